// BF16 by VDPBF16PS: pairs of products summed in FP32. Denormal inputs and sums count as zero, as
// the instruction defines.
#pragma once

#include <cstring>

#include "vectors_avx512.h"

namespace octavo {
namespace {

struct Avx512Bf16 : Avx512 {
  using Element = bf16;
  using Operand = __m512bh;  // 16 pairs
  static constexpr int kStep = 2;

  static Operand operand(const Element* x) { return reinterpret_cast<Operand>(load_bits(x)); }
  static Operand first_half(const Element* x) {
    const Bits low = set_bits(0xffff);
    return reinterpret_cast<Operand>(_mm512_and_si512(load_bits(x), low));
  }
  static Operand broadcast(const void* x) {
    int pair;
    std::memcpy(&pair, x, sizeof pair);
    return reinterpret_cast<Operand>(set_bits(pair));
  }
  static Vec dot(Vec sum, Operand a, Operand b) { return _mm512_dpbf16_ps(sum, a, b); }

  using Avx512::store;
  static void store(Element* x, Vec v) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(x), rounded(v));
  }

 protected:
  static __m256i rounded(Vec v) { return reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(v)); }
};

}  // namespace
}  // namespace octavo
