// Attention by AVX2, in FP32, and in BF16 that is widened to FP32 at each use.
#pragma GCC target("avx2,fma")

#include <immintrin.h>

#include "attention.h"

namespace octavo {
namespace {

struct Avx2 {
  using Vec = __m256;
  static constexpr int kWidth = 8;
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
  // Results below the normal numbers are 0; NaN stays NaN.
  static Vec scale(Vec a, Vec power) {
    const __m256i exponent = _mm256_slli_epi32(_mm256_cvtps_epi32(power), 23);
    const __m256i sum = _mm256_add_epi32(_mm256_castps_si256(a), exponent);
    const Vec normal = _mm256_cmp_ps(power, set(-125.0f), _CMP_NLT_UQ);
    return _mm256_and_ps(_mm256_castsi256_ps(sum), normal);
  }
  static Vec copy_sign(Vec a, Vec sign) {
    return _mm256_or_ps(a, _mm256_and_ps(set(-0.0f), sign));
  }
  static Vec select_below(Vec a, Vec bound, Vec below, Vec otherwise) {
    return _mm256_blendv_ps(otherwise, below, _mm256_cmp_ps(a, bound, _CMP_LT_OQ));
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

struct Fp32 : Avx2 {
  using Element = float;
  using Operand = Vec;
  static constexpr int kStep = 1;

  static Operand operand(const Element* x) { return load(x); }
  static Operand broadcast(const void* x) { return set(*static_cast<const float*>(x)); }
  static Vec dot(Vec sum, Operand a, Operand b) { return fma(a, b, sum); }
  static Vec load_elements(const Element* x) { return load(x); }
  static void store_elements(Element* x, Vec v) { store(x, v); }
};

struct Bf16 : Avx2 {
  using Element = bf16;
  struct Operand {
    Vec first, second;  // of each pair
  };
  static constexpr int kStep = 2;

  static Operand widened(__m256i pairs) {
    const __m256i high = _mm256_set1_epi32(static_cast<int>(0xffff0000));
    return {_mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16)),
            _mm256_castsi256_ps(_mm256_and_si256(pairs, high))};
  }
  static Operand operand(const Element* x) {
    return widened(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(x)));
  }
  static Operand first_half(const Element* x) { return {operand(x).first, set(0.0f)}; }
  static Operand broadcast(const void* x) {
    int pair;
    std::memcpy(&pair, x, sizeof pair);
    return widened(_mm256_set1_epi32(pair));
  }
  static Vec dot(Vec sum, Operand a, Operand b) {
    return fma(a.second, b.second, fma(a.first, b.first, sum));
  }
  static Vec load_elements(const Element* x) {
    const __m128i elements = _mm_loadu_si128(reinterpret_cast<const __m128i*>(x));
    return widened(_mm256_cvtepu16_epi32(elements)).first;
  }
  // To the nearest, ties to even; what is no number stays none.
  static void store_elements(Element* x, Vec v) {
    const __m256i bits = _mm256_castps_si256(v);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i bias = _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff));
    const __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(bits, bias), 16);
    const __m256i none = _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q));
    const __m256i elements = _mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7fc0), none);
    const __m128i low = _mm256_castsi256_si128(elements);
    const __m128i packed = _mm_packus_epi32(low, _mm256_extracti128_si256(elements, 1));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(x), packed);
  }
};

}  // namespace
}  // namespace octavo

void octavo_attention_f32_avx2(const OctavoAttention* step, float* qkv, float* cache,
                               const float* qk_weight, const float* sinks, float* out) {
  octavo::attention<octavo::Fp32>(*step, qkv, cache, qk_weight, sinks, out);
}

void octavo_attention_bf16_avx2(const OctavoAttention* step, octavo::bf16* qkv, octavo::bf16* cache,
                                const octavo::bf16* qk_weight, const float* sinks,
                                octavo::bf16* out) {
  octavo::attention<octavo::Bf16>(*step, qkv, cache, qk_weight, sinks, out);
}
