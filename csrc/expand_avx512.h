// What expand.h asks of an instruction set, by AVX-512; included where the target has been named.
#pragma once

#include "linear.h"
#include "vectors_avx512.h"

namespace octavo {
namespace {  // see numbers.h

template <class T>
struct Expand16 : Avx512 {
  using Element = T;
  using Table = Vec;

  template <int BITS>
  static OCTAVO_INLINE Table table(const float* from) {
    if constexpr (BITS == 4) return load(from);
    if constexpr (BITS == 3) return _mm512_broadcast_f32x8(_mm256_loadu_ps(from));
    return _mm512_broadcast_f32x4(_mm_loadu_ps(from));
  }
  // By four bits: tables that are smaller stand there several times.
  template <int BITS>
  static OCTAVO_INLINE Vec look_up(const Table& table, Bits codes) {
    return _mm512_permutexvar_ps(codes, table);
  }
  // A permutation of two vectors looks up in the tables of so many lanes.
  template <int BITS>
  static OCTAVO_INLINE Vec gather(const float* from, Bits codes) {
    constexpr int kLanes = 32 >> BITS;
    const Bits code = _mm512_and_si512(codes, _mm512_set1_epi32((1 << BITS) - 1));
    Bits found = _mm512_or_si512(code, _mm512_slli_epi32(numbers(), BITS));
    if constexpr (sizeof(T) == sizeof(bf16)) {  // 8 lanes, two inputs of each
      const Bits lanes = _mm512_slli_epi32(_mm512_srli_epi32(numbers(), 1), BITS);
      return _mm512_i32gather_ps(_mm512_or_si512(code, lanes), from, sizeof(float));
    }
#pragma GCC unroll 8
    for (int first = 0; first < kWidth; first += kLanes, from += 2 * kWidth) {
      const auto here = static_cast<__mmask16>(((1 << kLanes) - 1) << first);
      found = _mm512_castps_si512(
          _mm512_mask2_permutex2var_ps(load(from), found, here, load(from + kWidth)));
    }
    return _mm512_castsi512_ps(found);
  }
  template <int SHIFT>
  static OCTAVO_INLINE Bits down(Bits bits) {
    if constexpr (SHIFT >= 0) return _mm512_srli_epi32(bits, SHIFT < 0 ? 0 : SHIFT);
    return _mm512_slli_epi32(bits, SHIFT < 0 ? -SHIFT : 0);
  }
  static OCTAVO_INLINE Bits third(Bits low, Bits high) {
    // Where the mask is set the first, else the second; what is above the third bit is not asked.
    return _mm512_ternarylogic_epi32(_mm512_set1_epi32(3), low, high, 0xca);
  }
  static OCTAVO_INLINE Vec bytes(const char* from) {
    return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(sixteen(from)));
  }
  // FP16 has the bits of E4M3 further up, and an exponent that is larger by 8.
  static OCTAVO_INLINE Vec e4m3(const char* from) {
    const __m256i wide = _mm256_slli_epi16(_mm256_cvtepi8_epi16(sixteen(from)), 7);
    return _mm512_cvtph_ps(
        _mm256_and_si256(wide, _mm256_set1_epi16(static_cast<short>(0xbf80))));
  }
  static OCTAVO_INLINE Vec e5m2(const char* from) {
    return _mm512_cvtph_ps(_mm256_slli_epi16(_mm256_cvtepu8_epi16(sixteen(from)), 8));
  }
  // Each of 8 numbers twice.
  static OCTAVO_INLINE Vec twice(const float* from) {
    const Vec eight = _mm512_castps256_ps512(_mm256_loadu_ps(from));
    return _mm512_permutexvar_ps(_mm512_srli_epi32(numbers(), 1), eight);
  }

 private:
  static OCTAVO_INLINE __m128i sixteen(const char* from) {
    return _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
  }
  static OCTAVO_INLINE Bits numbers() {
    return _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  }
};

}  // namespace
}  // namespace octavo
