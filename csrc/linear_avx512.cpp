// Linears in FP32 by AVX-512.
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")

#include "elements.h"
#include "linear_dense.h"
#include "vectors_avx512.h"

namespace octavo {
namespace {

struct Dense16 : Fp32<Avx512> {
  static Operand one_input(const Element*) { return set(0.0f); }  // there is no odd one
};

}  // namespace
}  // namespace octavo

// 28 sums leave 4 of 32 registers.
void octavo_linear_f32_avx512(const void* arguments) {
  octavo::multiply<octavo::Dense<octavo::Dense16, 28>>(arguments);
}
