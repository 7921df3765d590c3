#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")

#include "norm.h"
#include "octavo.h"

void octavo_norm_f32_avx512(const float* x, const float* weight, float* y, int64_t rows,
                            int64_t size, float eps) {
  octavo::norm_rows(x, weight, y, rows, size, eps);
}

void octavo_norm_bf16_avx512(const octavo::bf16* x, const octavo::bf16* weight, octavo::bf16* y,
                             int64_t rows, int64_t size, float eps) {
  octavo::norm_rows(x, weight, y, rows, size, eps);
}
