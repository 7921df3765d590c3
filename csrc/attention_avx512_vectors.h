// FP32 vectors of AVX-512 for attention.h; included where the target has been named.
#pragma once

// GCC 12's own intrinsics begin with values that are not set, on purpose (its bug 105593).
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"

#include <immintrin.h>

namespace octavo {
namespace {

struct Avx512 {
  using Vec = __m512;
  static constexpr int kWidth = 16;
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
  static float sum(Vec a) { return _mm512_reduce_add_ps(a); }
  static float highest(Vec a) { return _mm512_reduce_max_ps(a); }
};

}  // namespace
}  // namespace octavo
