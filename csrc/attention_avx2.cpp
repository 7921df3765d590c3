// Attention by AVX2, in FP32, and in BF16 that is widened to FP32 at each use.
#pragma GCC target("avx2,fma")

#include "attention.h"
#include "attention_elements.h"
#include "vectors_avx2.h"

void octavo_attention_f32_avx2(const OctavoAttention* step, float* qkv, float* cache,
                               const float* qk_weight, const float* sinks, float* out) {
  octavo::attention<octavo::Fp32<octavo::Avx2>>(*step, qkv, cache, qk_weight, sinks, out);
}

void octavo_attention_bf16_avx2(const OctavoAttention* step, octavo::bf16* qkv,
                                octavo::bf16* cache, const octavo::bf16* qk_weight,
                                const float* sinks, octavo::bf16* out) {
  octavo::attention<octavo::WidenedBf16<octavo::Avx2>>(*step, qkv, cache, qk_weight, sinks, out);
}
