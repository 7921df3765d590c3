#pragma GCC target("avx2,fma,f16c")

#include "pointwise.h"
#include "vectors_avx2.h"

using octavo::bf16;
using Isa = octavo::Avx2;

void octavo_layer_norm_f32_avx2(const void* arguments) {
  octavo::layer_norm<Isa, float>(arguments);
}
void octavo_layer_norm_bf16_avx2(const void* arguments) {
  octavo::layer_norm<Isa, bf16>(arguments);
}
void octavo_activate_f32_avx2(const void* arguments) { octavo::activate<Isa, float>(arguments); }
void octavo_activate_bf16_avx2(const void* arguments) { octavo::activate<Isa, bf16>(arguments); }
void octavo_add_f32_avx2(const void* arguments) { octavo::add<Isa, float>(arguments); }
void octavo_add_bf16_avx2(const void* arguments) { octavo::add<Isa, bf16>(arguments); }
