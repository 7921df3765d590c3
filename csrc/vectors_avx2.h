// Vectors of AVX2, as in vectors_avx512.h; included where the target has been named.
#pragma once

#include <immintrin.h>

#include "numbers.h"

namespace octavo {
namespace {

struct Avx2 {
  using Vec = __m256;
  using Bits = __m256i;
  static constexpr int kWidth = 8;
  static constexpr int kPanelRows = 6;
  static constexpr int kVectors = 2;  // with six rows 12 sums, and 3 of 16 registers for operands

  static Vec set(float x) { return _mm256_set1_ps(x); }
  static Vec load(const float* x) { return _mm256_loadu_ps(x); }
  static void store(float* x, Vec v) { _mm256_storeu_ps(x, v); }
  static Vec add(Vec a, Vec b) { return _mm256_add_ps(a, b); }
  static Vec sub(Vec a, Vec b) { return _mm256_sub_ps(a, b); }
  static Vec mul(Vec a, Vec b) { return _mm256_mul_ps(a, b); }
  static Vec div(Vec a, Vec b) { return _mm256_div_ps(a, b); }
  static Vec fma(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }
  static Vec max(Vec a, Vec b) { return _mm256_max_ps(a, b); }
  static Vec abs(Vec a) { return _mm256_andnot_ps(set(-0.0f), a); }
  static Vec round(Vec a) {
    return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  }
  // a * 2^power, a in 0.5 .. 2. Results below the normal numbers are 0, infinite ones begin where
  // `power` is above 127; NaN stays NaN.
  static Vec scale(Vec a, Vec power) {
    const __m256i exponent = _mm256_slli_epi32(_mm256_cvtps_epi32(power), 23);
    const __m256i sum = _mm256_add_epi32(_mm256_castps_si256(a), exponent);
    const Vec normal = _mm256_cmp_ps(power, set(-125.0f), _CMP_NLT_UQ);
    const Vec above = _mm256_cmp_ps(power, set(127.0f), _CMP_GT_OQ);
    return _mm256_blendv_ps(_mm256_and_ps(_mm256_castsi256_ps(sum), normal),
                            set(__builtin_inff()), above);
  }
  static Vec copy_sign(Vec a, Vec sign) {
    return _mm256_or_ps(a, _mm256_and_ps(set(-0.0f), sign));
  }
  static Vec select_below(Vec a, Vec bound, Vec below, Vec otherwise) {
    return _mm256_blendv_ps(otherwise, below, _mm256_cmp_ps(a, bound, _CMP_LT_OQ));
  }
  static Bits load_bits(const void* x) {
    return _mm256_loadu_si256(static_cast<const __m256i*>(x));
  }
  static Bits set_bits(int pair) { return _mm256_set1_epi32(pair); }
  static Vec firsts(Bits pairs) { return _mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16)); }
  static Vec seconds(Bits pairs) {
    const Bits high = _mm256_set1_epi32(static_cast<int>(0xffff0000));
    return _mm256_castsi256_ps(_mm256_and_si256(pairs, high));
  }
  static Vec load(const int8_t* x) {
    const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(x));
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes));
  }
  static Vec load(const e4m3* x) {
    const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(x));
    const __m128i wide = _mm_slli_epi16(_mm_cvtepi8_epi16(bytes), 7);
    const __m128i halves = _mm_and_si128(wide, _mm_set1_epi16(static_cast<int16_t>(0xbfff)));
    const Vec found = mul(_mm256_cvtph_ps(halves), set(256.0f));
    const Vec none = _mm256_cmp_ps(abs(found), set(480.0f), _CMP_EQ_OQ);
    return _mm256_or_ps(found, none);
  }
  static Vec load(const e5m2* x) {
    const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(x));
    return _mm256_cvtph_ps(_mm_slli_epi16(_mm_cvtepu8_epi16(bytes), 8));
  }
  static Vec load(const bf16* x) {
    const __m128i elements = _mm_loadu_si128(reinterpret_cast<const __m128i*>(x));
    return firsts(_mm256_cvtepu16_epi32(elements));
  }
  // To the nearest, ties to even; what is no number stays none.
  static void store(bf16* x, Vec v) {
    const Bits bits = _mm256_castps_si256(v);
    const Bits odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const Bits bias = _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff));
    const Bits rounded = _mm256_srli_epi32(_mm256_add_epi32(bits, bias), 16);
    const Bits none = _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q));
    const Bits elements = _mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7fc0), none);
    const __m128i low = _mm256_castsi256_si128(elements);
    const __m128i packed = _mm_packus_epi32(low, _mm256_extracti128_si256(elements, 1));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(x), packed);
  }
  static float sum(Vec a) {
    __m128 half = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    half = _mm_add_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_add_ss(half, _mm_movehdup_ps(half)));
  }
  static float highest(Vec a) {
    __m128 half = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    half = _mm_max_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_max_ss(half, _mm_movehdup_ps(half)));
  }
};

}  // namespace
}  // namespace octavo
