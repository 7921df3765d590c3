// Numbers rounded to 8 bits. Plain loops that the compiler vectorizes for the instruction set of the
// file that includes this; all of them give the same bits.
#pragma once

#include <cfloat>
#include <cstdint>
#include <cstring>

#include "numbers.h"

namespace octavo {
namespace {  // see numbers.h

constexpr float kLevels = 127.0f;

inline uint32_t bits_of(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}

// max |x|, NaN if one is.
template <class T>
inline float largest_of(const T* x, int64_t count) {
  uint32_t top = 0;  // the order of positive numbers is that of their bits, NaN above infinity
  for (int64_t i = 0; i < count; ++i) {
    const uint32_t bits = bits_of(to_float(x[i])) & 0x7fffffffu;
    top = bits > top ? bits : top;
  }
  float found;
  std::memcpy(&found, &top, sizeof found);
  return found;
}

// Numbers times `factor`, -127 .. 127, as whole numbers. Returns their sum.
template <class T>
inline int32_t round_to(int8_t* to, const T* x, int64_t count, float factor) {
  const float whole = 12582912.0f;  // 1.5 * 2^23: a sum with it has no digits after the point
  int32_t sum = 0;
  for (int64_t i = 0; i < count; ++i) {
    const auto value = static_cast<int8_t>(bits_of(to_float(x[i]) * factor + whole) -
                                           bits_of(whole));
    to[i] = value;
    sum += value;
  }
  return sum;
}

// What makes the largest of some numbers 127. 0 where it is none, and for zeros and numbers so small
// that they count as such.
inline float levels_per(float largest) {
  const float factor = kLevels / largest;
  return factor <= FLT_MAX ? factor : 0.0f;
}

struct Rounded {
  float scale;
  int32_t sum;  // of the rounded numbers
};

// Rounds `count` numbers of a group and hands them to write(first, rounded, how many), zeros where
// the group has no more.
template <class T, class Write>
inline Rounded round_group(const T* x, int64_t count, int64_t group, const Write& write) {
  constexpr int64_t kAtATime = 256;
  const float top = largest_of(x, count);
  int32_t sum = 0;
  for (int64_t i = 0; i < group; i += kAtATime) {
    alignas(64) int8_t rounded[kAtATime] = {};
    if (i < count) sum += round_to(rounded, x + i, least(kAtATime, count - i), levels_per(top));
    write(i, rounded, least(kAtATime, group - i));
  }
  return {top / kLevels, sum};
}

}  // namespace
}  // namespace octavo
