#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,fma")

#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // in GCC 12's own intrinsics
#include <immintrin.h>

#include <cstring>

#include "linear.h"

namespace octavo {
namespace {

// VDPBF16PS. Denormal inputs and sums count as zero, as the instruction defines.
struct Avx512Bf16 {
  using Vector = __m512;
  using Weights = __m512bh;
  using Inputs = __m512bh;

  static OCTAVO_INLINE Weights weights(const bf16* from) {
    return reinterpret_cast<__m512bh>(_mm512_load_si512(from));
  }
  static OCTAVO_INLINE Inputs two_inputs(const bf16* from) {
    int32_t pair;
    std::memcpy(&pair, from, sizeof(pair));
    return reinterpret_cast<__m512bh>(_mm512_set1_epi32(pair));
  }
  static OCTAVO_INLINE Inputs one_input(const bf16* from) {
    return reinterpret_cast<__m512bh>(_mm512_set1_epi32(from->bits));
  }
  static OCTAVO_INLINE Vector dot(Vector sum, Weights weights, Inputs inputs) {
    return _mm512_dpbf16_ps(sum, weights, inputs);
  }

  static OCTAVO_INLINE Vector zero() { return _mm512_setzero_ps(); }
  static OCTAVO_INLINE Vector add(Vector a, Vector b) { return _mm512_add_ps(a, b); }
  static OCTAVO_INLINE Vector mul(Vector a, Vector b) { return _mm512_mul_ps(a, b); }
  static OCTAVO_INLINE Vector silu(Vector a) {
    const Vector one = _mm512_set1_ps(1.0f);
    return _mm512_div_ps(a, _mm512_add_ps(one, exp(_mm512_sub_ps(zero(), a))));
  }

  static OCTAVO_INLINE Vector load(const float* from) { return _mm512_loadu_ps(from); }
  static OCTAVO_INLINE Vector load(const bf16* from, int64_t count) {
    const __m512i bits = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(first(count), from));
    return _mm512_castsi512_ps(_mm512_slli_epi32(bits, 16));
  }
  static OCTAVO_INLINE void store(float* to, Vector vector, int64_t count) {
    if (count == kVector) {
      _mm512_storeu_ps(to, vector);
    } else {
      _mm512_mask_storeu_ps(to, first(count), vector);
    }
  }
  static OCTAVO_INLINE void store(bf16* to, Vector vector, int64_t count) {
    const __m256i rounded = reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(vector));
    if (count == kVector) {
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), rounded);
    } else {
      _mm256_mask_storeu_epi16(to, first(count), rounded);
    }
  }

 private:
  static OCTAVO_INLINE __mmask16 first(int64_t count) {
    return static_cast<__mmask16>((1u << count) - 1);
  }

  // e^a = 2^n e^r with |r| <= ln(2) / 2, where a Taylor polynomial of degree 7 is exact to FP32.
  static OCTAVO_INLINE Vector exp(Vector a) {
    a = _mm512_max_ps(_mm512_set1_ps(-104.0f), _mm512_min_ps(_mm512_set1_ps(104.0f), a));
    const Vector n = _mm512_roundscale_ps(_mm512_mul_ps(a, _mm512_set1_ps(1.44269504f)), 0);
    Vector r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), a);  // ln(2) in two parts
    r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), r);
    constexpr float kFactors[] = {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f};
    Vector sum = _mm512_set1_ps(1.0f / 5040);
#pragma GCC unroll 8
    for (const float factor : kFactors) sum = _mm512_fmadd_ps(sum, r, _mm512_set1_ps(factor));
    return _mm512_scalef_ps(sum, n);
  }
};

}  // namespace
}  // namespace octavo

void octavo_linear_bf16_avx512bf16(const OctavoLinear* linear, const octavo::bf16* x,
                                   const octavo::bf16* other, void* y, int64_t rows) {
  octavo::multiply<octavo::Avx512Bf16>({*linear, x, linear->inputs, other, y, rows});
}

void octavo_linear_pack(const octavo::bf16* weight, int64_t rows, int64_t inputs, int64_t first,
                        int64_t width, int64_t offset, octavo::bf16* panels) {
  const int64_t size = octavo::divide_up(inputs, 2) * 2 * octavo::kPanel;
#pragma omp parallel for
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t lane = offset + (first + row) % width;
    const octavo::bf16* from = weight + row * inputs;
    octavo::bf16* to = panels + (first + row) / width * size + 2 * lane;
    for (int64_t i = 0; i < inputs; ++i) to[i / 2 * 2 * octavo::kPanel + i % 2] = from[i];
  }
}
