#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")

#include "pointwise.h"
#include "vectors_avx512.h"

using octavo::bf16;
using Isa = octavo::Avx512;

void octavo_layer_norm_f32_avx512(const void* arguments) {
  octavo::layer_norm<Isa, float>(arguments);
}
void octavo_layer_norm_bf16_avx512(const void* arguments) {
  octavo::layer_norm<Isa, bf16>(arguments);
}
void octavo_activate_f32_avx512(const void* arguments) { octavo::activate<Isa, float>(arguments); }
void octavo_activate_bf16_avx512(const void* arguments) { octavo::activate<Isa, bf16>(arguments); }
void octavo_add_f32_avx512(const void* arguments) { octavo::add<Isa, float>(arguments); }
void octavo_add_bf16_avx512(const void* arguments) { octavo::add<Isa, bf16>(arguments); }
