// Linears in BF16 by VDPBF16PS.
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma")

#include "linear.h"
#include "vector_math.h"
#include "vectors_avx512bf16.h"

namespace octavo {
namespace {

struct Lanes : Avx512Bf16 {
  static OCTAVO_INLINE Operand one_input(const bf16* from) {
    return reinterpret_cast<Operand>(set_bits(from->bits));
  }
  static OCTAVO_INLINE Vec silu(Vec a) {
    const Vec power = exp2<Lanes>(mul(a, set(-kLog2e)));
    return div(a, add(set(1.0f), power));
  }

  using Avx512Bf16::load;
  static OCTAVO_INLINE Vec load(const bf16* from, int64_t count) {
    return firsts(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(first(count), from)));
  }
  static OCTAVO_INLINE void store(float* to, Vec vector, int64_t count) {
    if (count == kVector) {
      Avx512::store(to, vector);
    } else {
      _mm512_mask_storeu_ps(to, first(count), vector);
    }
  }
  static OCTAVO_INLINE void store(bf16* to, Vec vector, int64_t count) {
    if (count == kVector) {
      Avx512Bf16::store(to, vector);
    } else {
      _mm256_mask_storeu_epi16(to, first(count), rounded(vector));
    }
  }

 private:
  static OCTAVO_INLINE __mmask16 first(int64_t count) {
    return static_cast<__mmask16>((1u << count) - 1);
  }
};

}  // namespace
}  // namespace octavo

void octavo_linear_bf16_avx512bf16(const OctavoLinear* linear, const octavo::bf16* x,
                                   const octavo::bf16* other, void* y, int64_t rows) {
  octavo::multiply<octavo::Lanes>({*linear, x, linear->inputs, other, y, rows});
}

void octavo_linear_pack(const octavo::bf16* weight, int64_t rows, int64_t inputs, int64_t first,
                        int64_t width, int64_t offset, octavo::bf16* panels) {
  const int64_t size = octavo::ceil_div(inputs, 2) * 2 * octavo::kPanel;
#pragma omp parallel for
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t lane = offset + (first + row) % width;
    const octavo::bf16* from = weight + row * inputs;
    octavo::bf16* to = panels + (first + row) / width * size + 2 * lane;
    for (int64_t i = 0; i < inputs; ++i) to[i / 2 * 2 * octavo::kPanel + i % 2] = from[i];
  }
}
