// Linears by AMX.
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512bf16,avx2,fma,f16c")

#include "linear_tiles_dense.h"
#include "linear_tiles_expanded.h"
#include "linear_tiles_quantized.h"
#include "tiles.h"
#include "vectors_avx512bf16.h"
#include "vectors_avx512vnni.h"

void octavo_linear_bf16_amx(const void* arguments) {
  octavo::multiply_dense_tiles<octavo::Avx512Bf16, octavo::Tiles>(arguments);
}
void octavo_linear_quantized_amx(const void* arguments) {
  octavo::multiply_quantized_tiles<octavo::Vnni, octavo::Tiles>(arguments);
}
void octavo_linear_expanded_bf16_amx(const void* arguments) {
  octavo::multiply_expanded_tiles<octavo::Avx512Bf16, octavo::Tiles>(arguments);
}
