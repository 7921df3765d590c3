#pragma GCC target("avx2,fma,f16c")

#include "norm.h"

void octavo_norm_f32_avx2(const void* arguments) { octavo::norm_rows<float>(arguments); }
void octavo_norm_bf16_avx2(const void* arguments) { octavo::norm_rows<octavo::bf16>(arguments); }
