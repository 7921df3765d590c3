// Linears on weights that are expanded to FP32, by AVX-512.
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")

#include "elements.h"
#include "expand.h"
#include "expand_avx512.h"
#include "linear_expanded.h"

namespace octavo {
namespace {

struct Dense16 : Fp32<Avx512> {
  static Operand one_input(const Element*) { return set(0.0f); }  // there is no odd one
};

}  // namespace
}  // namespace octavo

// 28 sums, as with dense weights.
void octavo_linear_expanded_f32_avx512(const void* arguments) {
  using Expand = octavo::Expand16<float>;
  octavo::multiply<octavo::Expanded<octavo::Dense16, 28, octavo::expander<Expand>>>(arguments);
}
