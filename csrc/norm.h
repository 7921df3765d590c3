// RMS norm (Zhang and Sennrich 2019). Plain loops that the compiler vectorizes for the instruction
// set of the file that includes this; a row is summed in one order whatever other rows there are.
#pragma once

#include <cmath>
#include <cstdint>

#include "numbers.h"

namespace octavo {
namespace {  // see numbers.h

// Rows below this take less time than to wake the other threads.
constexpr int64_t kSerialRows = 8;

template <typename T>
void norm_row(const T* x, const T* weight, T* y, int64_t size, float eps) {
  float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < size; ++i) {
    const float value = to_float(x[i]);
    sum += value * value;
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
void norm_rows(const T* x, const T* weight, T* y, int64_t rows, int64_t size, float eps) {
#pragma omp parallel for schedule(static) if (rows >= kSerialRows)
  for (int64_t row = 0; row < rows; ++row) {
    norm_row(x + row * size, weight, y + row * size, size, eps);
  }
}

}  // namespace
}  // namespace octavo
