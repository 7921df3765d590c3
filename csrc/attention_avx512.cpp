// Attention by AVX-512, in FP32, and in BF16 that is widened to FP32 at each use.
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")

#include "attention.h"
#include "elements.h"
#include "vectors_avx512.h"

void octavo_attention_f32_avx512(const void* arguments) {
  octavo::attention<octavo::Fp32<octavo::Avx512>>(arguments);
}

void octavo_attention_bf16_avx512(const void* arguments) {
  octavo::attention<octavo::WidenedBf16<octavo::Avx512>>(arguments);
}
