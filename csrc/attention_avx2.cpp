// Attention by AVX2, in FP32, and in BF16 that is widened to FP32 at each use.
#pragma GCC target("avx2,fma,f16c")

#include "attention.h"
#include "elements.h"
#include "vectors_avx2.h"

void octavo_attention_f32_avx2(const void* arguments) {
  octavo::attention<octavo::Fp32<octavo::Avx2>>(arguments);
}

void octavo_attention_bf16_avx2(const void* arguments) {
  octavo::attention<octavo::WidenedBf16<octavo::Avx2>>(arguments);
}
