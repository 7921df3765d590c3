// Sizes; elements in memory and the floats they are computed as.
#pragma once

#include <cstdint>
#include <cstring>

namespace octavo {

struct bf16 {
  uint16_t bits;
};

// See float8.h.
struct e4m3 {
  uint8_t bits;
};
struct e5m2 {
  uint8_t bits;
};

// Unnamed: each instruction set compiles its own, and the linker must not merge them into one.
namespace {

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t largest(int64_t a, int64_t b) { return a > b ? a : b; }

inline float to_float(float x) { return x; }

inline float to_float(bf16 x) {
  const uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

template <typename T>
T from_float(float x);

template <>
inline float from_float<float>(float x) {
  return x;
}

// To the nearest, ties to even; a NaN stays one.
template <>
inline bf16 from_float<bf16>(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const uint32_t quiet = (bits >> 16) | 0x40u;
  return bf16{static_cast<uint16_t>(x != x ? quiet : rounded)};
}

}  // namespace
}  // namespace octavo
