// Linears on weights that are expanded to FP32, by AVX2.
#pragma GCC target("avx2,fma,f16c")

#include "elements.h"
#include "expand.h"
#include "expand_avx2.h"
#include "linear_expanded.h"

namespace octavo {
namespace {

struct Dense8 : Fp32<Avx2> {
  static Operand one_input(const Element*) { return set(0.0f); }  // there is no odd one
  static Vec load_halves(const uint16_t* from) { return Expand8::load_halves(from); }
};

}  // namespace
}  // namespace octavo

// 12 sums, as with dense weights.
void octavo_linear_expanded_f32_avx2(const void* arguments) {
  octavo::multiply<octavo::Expanded<octavo::Dense8, 12, octavo::expander<octavo::Expand8>>>(
      arguments);
}
