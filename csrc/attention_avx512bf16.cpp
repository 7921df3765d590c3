// Attention in BF16 by VDPBF16PS.
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma")

#include "attention.h"
#include "vectors_avx512bf16.h"

void octavo_attention_bf16_avx512bf16(const void* arguments) {
  octavo::attention<octavo::Avx512Bf16>(arguments);
}
