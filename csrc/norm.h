// RMS norm (Zhang and Sennrich 2019). Plain loops that the compiler vectorizes for the instruction
// set of the file that includes this; a row is summed in one order whatever other rows there are.
#pragma once

#include <cmath>
#include <cstdint>

#include "numbers.h"
#include "octavo.h"

namespace octavo {
namespace {  // see numbers.h

template <typename T>
void norm_row(const T* x, const T* weight, T* y, int64_t size, float eps) {
  float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < size; ++i) {
    const float value = to_float(x[i]);
    sum = std::fma(value, value, sum);
  }
  const float scale = 1.0f / std::sqrt(sum / static_cast<float>(size) + eps);
#pragma omp simd
  for (int64_t i = 0; i < size; ++i) {
    // Rounded before the weight is applied, as the definition does.
    const float normed = to_float(from_float<T>(to_float(x[i]) * scale));
    y[i] = from_float<T>(normed * to_float(weight[i]));
  }
}

template <typename T>
void norm_rows(const void* arguments) {
  const auto& call = *static_cast<const OctavoNormCall*>(arguments);
  const T* const x = static_cast<const T*>(call.x);
  const T* const weight = static_cast<const T*>(call.weight);
  T* const y = static_cast<T*>(call.y);
#pragma omp for schedule(static)
  for (int64_t row = 0; row < *call.rows; ++row)
    norm_row(x + row * call.size, weight, y + row * call.size, call.size, call.eps);
}

}  // namespace
}  // namespace octavo
