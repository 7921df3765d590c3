#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")

#include "norm.h"

void octavo_norm_f32_avx512(const void* arguments) { octavo::norm_rows<float>(arguments); }
void octavo_norm_bf16_avx512(const void* arguments) { octavo::norm_rows<octavo::bf16>(arguments); }
