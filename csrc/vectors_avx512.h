// Vectors of AVX-512; included where the target has been named.
//
// What the kernels ask of an instruction set: arithmetic on a `Vec` of kWidth FP32 numbers, which
// is loaded from FP32 or BF16 and stored as either; kVectors, how many vectors of a row are summed
// in registers at once, and kPanelRows, of how many rows together; and, for BF16 that is widened,
// `Bits`, pairs of numbers in 32 bits each.
#pragma once

// GCC 12's own intrinsics begin with values that are not set, on purpose (its bug 105593).
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"

#include <immintrin.h>

#include "numbers.h"

namespace octavo {
namespace {

struct Avx512 {
  using Vec = __m512;
  using Bits = __m512i;
  static constexpr int kWidth = 16;
  static constexpr int kPanelRows = 6;
  static constexpr int kVectors = 4;  // with six rows 24 sums, and 5 of 32 registers for operands

  static Vec set(float x) { return _mm512_set1_ps(x); }
  static Vec load(const float* x) { return _mm512_loadu_ps(x); }
  static void store(float* x, Vec v) { _mm512_storeu_ps(x, v); }
  static Vec add(Vec a, Vec b) { return _mm512_add_ps(a, b); }
  static Vec sub(Vec a, Vec b) { return _mm512_sub_ps(a, b); }
  static Vec mul(Vec a, Vec b) { return _mm512_mul_ps(a, b); }
  static Vec div(Vec a, Vec b) { return _mm512_div_ps(a, b); }
  static Vec fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
  static Vec max(Vec a, Vec b) { return _mm512_max_ps(a, b); }
  static Vec abs(Vec a) { return _mm512_abs_ps(a); }
  static Vec round(Vec a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT); }
  static Vec scale(Vec a, Vec power) { return _mm512_scalef_ps(a, power); }
  static Vec copy_sign(Vec a, Vec sign) {
    const Vec bit = _mm512_set1_ps(-0.0f);
    return _mm512_or_ps(a, _mm512_and_ps(bit, sign));
  }
  static Vec select_below(Vec a, Vec bound, Vec below, Vec otherwise) {
    return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, bound, _CMP_LT_OQ), otherwise, below);
  }
  static Bits load_bits(const void* x) { return _mm512_loadu_si512(x); }
  static void store_bits(void* x, Bits bits) { _mm512_storeu_si512(x, bits); }
  static Bits set_bits(int pair) { return _mm512_set1_epi32(pair); }
  static Vec firsts(Bits pairs) { return _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16)); }
  static Vec seconds(Bits pairs) {
    const Bits high = _mm512_set1_epi32(static_cast<int>(0xffff0000));
    return _mm512_castsi512_ps(_mm512_and_si512(pairs, high));
  }
  static Vec load(const int8_t* x) {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(x));
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes));
  }
  // FP16 has E4M3's digits at its own place, below an exponent that counts from 15, not 7.
  static Vec load(const e4m3* x) {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(x));
    const __m256i wide = _mm256_slli_epi16(_mm256_cvtepi8_epi16(bytes), 7);
    const __m256i halves = _mm256_and_si256(wide, _mm256_set1_epi16(static_cast<int16_t>(0xbfff)));
    const Vec found = mul(_mm512_cvtph_ps(halves), set(256.0f));
    const __mmask16 none = _mm512_cmp_ps_mask(abs(found), set(480.0f), _CMP_EQ_OQ);
    return _mm512_mask_mov_ps(found, none, set(__builtin_nanf("")));
  }
  static Vec load(const e5m2* x) {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(x));
    return _mm512_cvtph_ps(_mm256_slli_epi16(_mm256_cvtepu8_epi16(bytes), 8));
  }
  static Vec load(const bf16* x) {
    const __m256i elements = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x));
    return firsts(_mm512_cvtepu16_epi32(elements));
  }
  static Vec load_halves(const uint16_t* x) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(x)));
  }
  // To the nearest, ties to even; what is no number stays none.
  static void store(bf16* x, Vec v) {
    const Bits bits = _mm512_castps_si512(v);
    const Bits odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const Bits bias = _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff));
    const Bits rounded = _mm512_srli_epi32(_mm512_add_epi32(bits, bias), 16);
    const __mmask16 none = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
    const Bits elements = _mm512_mask_mov_epi32(rounded, none, _mm512_set1_epi32(0x7fc0));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(x), _mm512_cvtepi32_epi16(elements));
  }
  static float sum(Vec a) { return _mm512_reduce_add_ps(a); }
  static float highest(Vec a) { return _mm512_reduce_max_ps(a); }
};

}  // namespace
}  // namespace octavo
