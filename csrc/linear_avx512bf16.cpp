// Linears in BF16 by VDPBF16PS.
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma")

#include "linear_dense.h"
#include "vectors_avx512bf16.h"

namespace octavo {
namespace {

struct Pairs16 : Avx512Bf16 {
  static OCTAVO_INLINE Operand one_input(const bf16* from) {
    return reinterpret_cast<Operand>(set_bits(from->bits));
  }
};

}  // namespace
}  // namespace octavo

// 28 sums leave 4 of 32 registers.
void octavo_linear_bf16_avx512bf16(const void* arguments) {
  octavo::multiply<octavo::Dense<octavo::Pairs16, 28>>(arguments);
}
