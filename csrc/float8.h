// Numbers of 8 bits: E4M3 without infinities and E5M2 (OCP 8-bit Floating Point Specification 1.0).
// Plain loops that the compiler vectorizes; how vectors are read from them: vectors_avx512.h.
#pragma once

#include "rounding.h"

namespace octavo {
namespace {  // see numbers.h

// |x| beyond `largest` becomes that, a NaN stays one; to the nearest, ties to even.
template <int kMantissa, int kBias>
inline uint8_t encoded(float x, float largest) {
  constexpr int kDropped = 23 - kMantissa;
  constexpr uint32_t kUnit = static_cast<uint32_t>(127 + 24 - kBias - kMantissa) << 23;
  constexpr uint32_t kNormal = static_cast<uint32_t>(128 - kBias) << 23;  // the least of these
  const float magnitude = __builtin_fabsf(x) < largest ? __builtin_fabsf(x) : largest;
  const uint32_t bits = bits_of(magnitude);
  const uint32_t rounded = bits + (1u << (kDropped - 1)) - 1 + ((bits >> kDropped) & 1u);
  const uint32_t normal =
      (rounded >> kDropped) - (static_cast<uint32_t>(127 - kBias) << kMantissa);
  float unit;  // a sum with it has no digits below those that denormal numbers have
  std::memcpy(&unit, &kUnit, sizeof unit);
  const uint32_t denormal = bits_of(magnitude + unit) - kUnit;
  const uint32_t code = x != x ? 0x7fu : bits < kNormal ? denormal : normal;
  return static_cast<uint8_t>(code | (bits_of(x) >> 24 & 0x80u));
}

template <class Code>
struct Float8;

template <>
struct Float8<e4m3> {
  static uint8_t encode(float x) { return encoded<3, 7>(x, 448.0f); }
};

template <>
struct Float8<e5m2> {
  static uint8_t encode(float x) { return encoded<2, 15>(x, 57344.0f); }
};

}  // namespace
}  // namespace octavo
