// Functions of vectors of FP32 numbers, for any instruction set: `Isa` brings the arithmetic (see
// vectors_avx512.h).
#pragma once

namespace octavo {
namespace {  // see numbers.h

constexpr float kLog2e = 1.44269504088896341f;

// 2^x with a relative error of 3e-7, exact at 0; 0 for x <= -200 and so for -inf; infinite above 128
// (with AVX2 above 127.5); NaN for NaN.
template <class Isa>
inline typename Isa::Vec exp2(typename Isa::Vec x) {
  x = Isa::max(Isa::set(-200.0f), x);  // the second where one is no number
  const auto whole = Isa::round(x);
  const auto r = Isa::sub(x, whole);  // in -0.5 .. 0.5
  // (2^r - 1) / r, a least-squares fit at Chebyshev's points.
  auto p = Isa::set(1.3390867e-3f);
  p = Isa::fma(p, r, Isa::set(9.6663740e-3f));
  p = Isa::fma(p, r, Isa::set(5.5503570e-2f));
  p = Isa::fma(p, r, Isa::set(2.4022348e-1f));
  p = Isa::fma(p, r, Isa::set(6.9314718e-1f));
  return Isa::scale(Isa::fma(p, r, Isa::set(1.0f)), whole);
}

template <class Isa>
inline typename Isa::Vec tanh(typename Isa::Vec x) {
  const auto size = Isa::abs(x);
  const auto power = exp2<Isa>(Isa::mul(size, Isa::set(-2 * kLog2e)));
  const auto one = Isa::set(1.0f);
  const auto far = Isa::div(Isa::sub(one, power), Isa::add(one, power));
  const auto z = Isa::mul(x, x);  // near 0 a series keeps the relative error
  auto p = Isa::set(2.3735133e-3f);
  p = Isa::fma(p, z, Isa::set(-8.4125520e-3f));
  p = Isa::fma(p, z, Isa::set(2.1789107e-2f));
  p = Isa::fma(p, z, Isa::set(-5.3961653e-2f));
  p = Isa::fma(p, z, Isa::set(1.3333313e-1f));
  p = Isa::fma(p, z, Isa::set(-3.3333334e-1f));
  const auto near = Isa::fma(Isa::mul(p, z), size, size);
  return Isa::copy_sign(Isa::select_below(size, Isa::set(0.6f), near, far), x);
}

}  // namespace
}  // namespace octavo
