// Products of 8 bits by VPDPBUSD; what linear_quantized.h asks of an instruction set.
#pragma once

#include "linear.h"
#include "vectors_avx512.h"

namespace octavo {
namespace {

struct Vnni : Avx512 {
  using Ints = __m512i;
  template <int BITS>
  static constexpr int kOffset = 0;

  template <int BITS>
  static OCTAVO_INLINE void codes(const char* from, Ints (&to)[2]) {
    if constexpr (BITS == 4) {
      const Ints both = load_bits(from), low = _mm512_set1_epi8(15);
      to[0] = _mm512_and_si512(both, low);
      to[1] = _mm512_and_si512(_mm512_srli_epi16(both, 4), low);
    } else {
      to[0] = load_bits(from);
      to[1] = load_bits(from + sizeof(Ints));
    }
  }
  template <int BITS>
  static OCTAVO_INLINE Ints dot(Ints sums, Ints codes, Ints quad) {
    // Not the intrinsic, for which GCC 12 copies the sums at every product.
    asm("vpdpbusd %2, %1, %0" : "+v"(sums) : "v"(codes), "v"(quad));
    return sums;
  }
  static OCTAVO_INLINE Ints set_bytes(char x) { return _mm512_set1_epi8(x); }
  static OCTAVO_INLINE Ints sub_bytes(Ints a, Ints b) { return _mm512_sub_epi8(a, b); }
  static OCTAVO_INLINE Ints set_ints(int x) { return _mm512_set1_epi32(x); }
  static OCTAVO_INLINE Ints quad(const int8_t* from) {
    int four;
    std::memcpy(&four, from, sizeof four);
    return set_ints(four);
  }
  static OCTAVO_INLINE Vec floats(Ints ints) { return _mm512_cvtepi32_ps(ints); }
};

}  // namespace
}  // namespace octavo
