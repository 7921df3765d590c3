// Linears on quantized weights by VPDPBUSD.
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")

#include "linear_quantized.h"
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
  static OCTAVO_INLINE Ints set_ints(int x) { return _mm512_set1_epi32(x); }
  static OCTAVO_INLINE Ints quad(const int8_t* from) {
    int four;
    std::memcpy(&four, from, sizeof four);
    return set_ints(four);
  }
  static OCTAVO_INLINE Vec floats(Ints ints) { return _mm512_cvtepi32_ps(ints); }
  static OCTAVO_INLINE Vec load_halves(const uint16_t* from) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
  }
};

}  // namespace
}  // namespace octavo

// With 12 rows 24 sums, and 3 of 32 registers for codes and inputs.
void octavo_linear_quantized_avx512vnni(const void* arguments) {
  octavo::multiply_quantized<octavo::Vnni, 12>(arguments);
}
