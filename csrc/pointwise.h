// What stands between linears where neither of them does it: layer norms, activations, sums.
//
// `Isa`: vectors, see vectors_avx512.h. A number's result does not depend on where it lies: what is
// left of a row after whole vectors goes through the same arithmetic.
#pragma once

#include "linear.h"
#include "octavo.h"
#include "vector_math.h"

namespace octavo {
namespace {  // see numbers.h

// Calls f(vectors...) -> vector for every number of a row of `to` and of those it is made of.
template <class Isa, class T, class F, class... Rows>
OCTAVO_INLINE void each(int64_t size, T* to, const F& f, const Rows*... rows) {
  for (int64_t i = 0; i < size; i += Isa::kWidth)
    store_firsts<Isa>(to + i, f(load_firsts<Isa>(rows + i, size - i)...), size - i);
}

template <class Isa, class T>
void layer_norm_row(const T* x, const T* weight, const T* bias, T* y, int64_t size, float eps) {
  const auto sum_of = [&](const auto& f) {
    auto sums = Isa::set(0.0f);
    int64_t i = 0;
    for (; i + Isa::kWidth <= size; i += Isa::kWidth) sums = Isa::add(sums, f(Isa::load(x + i)));
    float numbers[Isa::kWidth];
    if (i < size) Isa::store(numbers, f(load_firsts<Isa>(x + i, size - i)));
    float sum = Isa::sum(sums);
    for (int64_t rest = 0; rest < size - i; ++rest) sum += numbers[rest];
    return sum;
  };
  const auto count = static_cast<float>(size);
  const auto mean = Isa::set(sum_of([](auto v) { return v; }) / count);
  const float square = sum_of([&](auto v) {
    const auto from = Isa::sub(v, mean);
    return Isa::mul(from, from);
  });
  const auto scale = Isa::set(1.0f / __builtin_sqrtf(square / count + eps));
  each<Isa>(
      size, y,
      [&](auto v, auto w, auto b) { return Isa::fma(Isa::mul(Isa::sub(v, mean), scale), w, b); }, x,
      weight, bias);
}

template <class Isa, class T>
void layer_norm(const void* arguments) {
  const auto& call = *static_cast<const OctavoLayerNormCall*>(arguments);
  const T* const x = static_cast<const T*>(call.x);
#pragma omp for schedule(static)
  for (int64_t row = 0; row < *call.rows; ++row)
    layer_norm_row<Isa>(x + row * call.size, static_cast<const T*>(call.weight),
                        static_cast<const T*>(call.bias),
                        static_cast<T*>(call.y) + row * call.size, call.size, call.eps);
}

// x * Phi(x). erf by formula 7.1.26 of Abramowitz and Stegun, off by 1.5e-7 at most.
template <class Isa>
OCTAVO_INLINE typename Isa::Vec gelu(typename Isa::Vec x) {
  const auto one = Isa::set(1.0f), z = Isa::mul(Isa::abs(x), Isa::set(0.70710678f));
  const auto t = Isa::div(one, Isa::fma(z, Isa::set(0.3275911f), one));
  auto p = Isa::set(1.061405429f);
  p = Isa::fma(p, t, Isa::set(-1.453152027f));
  p = Isa::fma(p, t, Isa::set(1.421413741f));
  p = Isa::fma(p, t, Isa::set(-0.284496736f));
  p = Isa::fma(p, t, Isa::set(0.254829592f));
  const auto power = exp2<Isa>(Isa::mul(Isa::mul(z, z), Isa::set(-kLog2e)));
  const auto erf = Isa::sub(one, Isa::mul(Isa::mul(p, t), power));
  return Isa::mul(Isa::mul(x, Isa::set(0.5f)), Isa::add(one, Isa::copy_sign(erf, x)));
}

// x * Phi(x) with tanh in place of erf (Hendrycks and Gimpel 2016).
template <class Isa>
OCTAVO_INLINE typename Isa::Vec gelu_tanh(typename Isa::Vec x) {
  const auto inner = Isa::fma(Isa::mul(Isa::mul(x, x), x), Isa::set(0.044715f), x);
  const auto turn = tanh<Isa>(Isa::mul(inner, Isa::set(0.7978845608f)));  // sqrt(2 / pi)
  return Isa::mul(Isa::mul(x, Isa::set(0.5f)), Isa::add(Isa::set(1.0f), turn));
}

template <class Isa>
OCTAVO_INLINE typename Isa::Vec activation(typename Isa::Vec x, int64_t kind) {
  if (kind == OCTAVO_SILU) return silu<Isa>(x);
  if (kind == OCTAVO_GELU) return gelu<Isa>(x);
  if (kind == OCTAVO_GELU_TANH) return gelu_tanh<Isa>(x);
  return Isa::max(Isa::set(0.0f), x);  // the second where one is no number
}

template <class Isa, class T>
void activate(const void* arguments) {
  const auto& call = *static_cast<const OctavoActivateCall*>(arguments);
  const int64_t size = call.size, kind = call.activation;
#pragma omp for schedule(static)
  for (int64_t row = 0; row < *call.rows; ++row) {
    T* const y = static_cast<T*>(call.y) + row * size;
    const T* const x = static_cast<const T*>(call.x) + row * size * (call.gated ? 2 : 1);
    if (call.gated) {
      each<Isa>(
          size, y, [&](auto v, auto up) { return Isa::mul(activation<Isa>(v, kind), up); }, x,
          x + size);
    } else {
      each<Isa>(size, y, [&](auto v) { return activation<Isa>(v, kind); }, x);
    }
  }
}

template <class Isa, class T>
void add(const void* arguments) {
  const auto& call = *static_cast<const OctavoAddCall*>(arguments);
  const auto scale = Isa::set(call.scale);
#pragma omp for schedule(static)
  for (int64_t row = 0; row < *call.rows; ++row) {
    T* const y = static_cast<T*>(call.y) + row * call.size;
    const T* const other = static_cast<const T*>(call.other) + row * call.size;
    if (call.x) {
      each<Isa>(
          call.size, y, [&](auto v, auto o) { return Isa::fma(o, scale, v); },
          static_cast<const T*>(call.x) + row * call.size, other);
    } else {
      each<Isa>(call.size, y, [&](auto o) { return Isa::mul(o, scale); }, other);
    }
  }
}

}  // namespace
}  // namespace octavo
