// Linears on quantized weights by VPDPBUSD.
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")

#include "linear_quantized.h"
#include "vectors_avx512vnni.h"

// With 12 rows 24 sums, and 3 of 32 registers for codes and inputs.
void octavo_linear_quantized_avx512vnni(const void* arguments) {
  octavo::multiply_quantized<octavo::Vnni, 12>(arguments);
}
