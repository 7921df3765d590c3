// What expand.h asks of an instruction set, by AVX2; included where the target has been named.
#pragma once

#include "linear.h"
#include "vectors_avx2.h"

namespace octavo {
namespace {  // see numbers.h

struct Expand8 : Avx2 {
  using Element = float;
  struct Table {
    Vec low, high;
  };

  template <int BITS>
  static OCTAVO_INLINE Table table(const float* from) {
    if constexpr (BITS == 4) return {load(from), load(from + kWidth)};
    if constexpr (BITS == 3) return {load(from), load(from)};
    const Vec twice = _mm256_broadcast_ps(reinterpret_cast<const __m128*>(from));
    return {twice, twice};
  }
  template <int BITS>
  static OCTAVO_INLINE Vec look_up(const Table& table, Bits codes) {
    const Vec low = _mm256_permutevar8x32_ps(table.low, codes);  // by three bits
    if constexpr (BITS < 4) return low;
    const Vec high = _mm256_permutevar8x32_ps(table.high, codes);
    return _mm256_blendv_ps(low, high, _mm256_castsi256_ps(_mm256_slli_epi32(codes, 28)));
  }
  template <int BITS>
  static OCTAVO_INLINE Vec gather(const float* from, Bits codes) {
    const Bits lanes = _mm256_slli_epi32(_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), BITS);
    const Bits code = _mm256_and_si256(codes, _mm256_set1_epi32((1 << BITS) - 1));
    return _mm256_i32gather_ps(from, _mm256_or_si256(code, lanes), sizeof(float));
  }
  template <int SHIFT>
  static OCTAVO_INLINE Bits down(Bits bits) {
    if constexpr (SHIFT >= 0) return _mm256_srli_epi32(bits, SHIFT);
    return _mm256_slli_epi32(bits, SHIFT < 0 ? -SHIFT : 0);
  }
  static OCTAVO_INLINE Bits third(Bits low, Bits high) {
    return _mm256_or_si256(_mm256_and_si256(low, _mm256_set1_epi32(3)),
                           _mm256_and_si256(high, _mm256_set1_epi32(4)));
  }
  static OCTAVO_INLINE Vec bytes(const char* from) {
    return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(eight(from)));
  }
  // FP16 has the bits of E4M3 further up, and an exponent that is larger by 8.
  static OCTAVO_INLINE Vec e4m3(const char* from) {
    const __m128i wide = _mm_slli_epi16(_mm_cvtepi8_epi16(eight(from)), 7);
    return _mm256_cvtph_ps(_mm_and_si128(wide, _mm_set1_epi16(static_cast<short>(0xbf80))));
  }
  static OCTAVO_INLINE Vec e5m2(const char* from) {
    return _mm256_cvtph_ps(_mm_slli_epi16(_mm_cvtepu8_epi16(eight(from)), 8));
  }
  static OCTAVO_INLINE Vec load_halves(const uint16_t* from) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
  }

 private:
  static OCTAVO_INLINE __m128i eight(const char* from) {
    return _mm_loadl_epi64(reinterpret_cast<const __m128i*>(from));
  }
};

}  // namespace
}  // namespace octavo
