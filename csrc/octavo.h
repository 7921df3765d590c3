// The C interface of octavo's CPU kernels.
//
// Plain functions on addresses, called through ctypes with the GIL released. Shapes are row-major;
// BF16 numbers are uint16_t. Nothing is allocated that outlives a call. Each instruction set is a
// source file of its own that begins by naming its target, so that one build serves every x86-64
// machine; the caller asks octavo_features() which of them may run.
#pragma once

#include <cstdint>

#include "numbers.h"

#define OCTAVO_API extern "C" __attribute__((visibility("default")))

// Bits of octavo_features().
enum {
  OCTAVO_AVX2 = 1,         // AVX2, FMA, F16C
  OCTAVO_AVX512 = 2,       // AVX-512 F, BW, DQ, VL
  OCTAVO_AVX512_BF16 = 4,  // and VDPBF16PS
};

// What this CPU and its operating system can run.
OCTAVO_API int64_t octavo_features();

// y = x / sqrt(mean(x^2) + eps) * weight. x, y: [rows, size]; weight: [size].
#define OCTAVO_NORM(name, T)                                                                 \
  OCTAVO_API void name(const T* x, const T* weight, T* y, int64_t rows, int64_t size, float eps)
OCTAVO_NORM(octavo_norm_f32_avx2, float);
OCTAVO_NORM(octavo_norm_f32_avx512, float);
OCTAVO_NORM(octavo_norm_bf16_avx2, octavo::bf16);
OCTAVO_NORM(octavo_norm_bf16_avx512, octavo::bf16);
#undef OCTAVO_NORM
