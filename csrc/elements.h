// What is multiplied where an instruction set has no product of BF16: FP32 numbers, or BF16
// numbers that are widened to FP32 at each use. `Vectors`: see vectors_avx512.h.
#pragma once

#include <cstring>

#include "numbers.h"

namespace octavo {
namespace {  // see numbers.h

template <class Vectors>
struct Fp32 : Vectors {
  using Element = float;
  using Vec = typename Vectors::Vec;
  using Operand = Vec;
  static constexpr int kStep = 1;

  static Operand operand(const Element* x) { return Vectors::load(x); }
  static Operand broadcast(const void* x) { return Vectors::set(*static_cast<const float*>(x)); }
  static Vec dot(Vec sum, Operand a, Operand b) { return Vectors::fma(a, b, sum); }
};

template <class Vectors>
struct WidenedBf16 : Vectors {
  using Element = bf16;
  using Vec = typename Vectors::Vec;
  struct Operand {
    Vec first, second;  // of each pair
  };
  static constexpr int kStep = 2;
  static constexpr int kVectors = 2;  // operands take two registers

  static Operand operand(const Element* x) { return widened(Vectors::load_bits(x)); }
  static Operand first_half(const Element* x) { return {operand(x).first, Vectors::set(0.0f)}; }
  static Operand broadcast(const void* x) {
    int pair;
    std::memcpy(&pair, x, sizeof pair);
    return widened(Vectors::set_bits(pair));
  }
  static Vec dot(Vec sum, Operand a, Operand b) {
    return Vectors::fma(a.second, b.second, Vectors::fma(a.first, b.first, sum));
  }

 private:
  static Operand widened(typename Vectors::Bits pairs) {
    return {Vectors::firsts(pairs), Vectors::seconds(pairs)};
  }
};

}  // namespace
}  // namespace octavo
