// What a linear writes down of its inputs before it multiplies them.
#pragma once

#include "numbers.h"
#include "octavo.h"

namespace octavo {
namespace {  // see numbers.h

constexpr int64_t kConflict = 2048;  // bytes: rows a multiple of these apart meet in a cache
constexpr int64_t kApart = 64;       // bytes between rows that would

inline bool rows_conflict(const OctavoLinear& linear) {
  const int64_t size = linear.element == OCTAVO_BF16 ? sizeof(bf16) : sizeof(float);
  return linear.inputs * size % kConflict == 0;
}
inline int64_t num_groups(const OctavoLinear& linear) {
  return ceil_div(linear.inputs, linear.group);
}
// Inputs rounded to 8 bits lie in blocks of rows, [groups] of: scales [width]; sums [width]; starts
// [width]; inputs [group / 4][width][4]. So a tile's rows are neighbours. Blocks are of equal size.
struct RoundedLayout {
  static constexpr int64_t kMaxWidth = 12;

  int64_t blocks, width, group_bytes, block_bytes;
  RoundedLayout(const OctavoLinear& linear, int64_t rows)
      : blocks(ceil_div(rows, kMaxWidth)),
        width(blocks ? ceil_div(rows, blocks) : 0),
        group_bytes(bytes_of_group(linear, width)),
        block_bytes(num_groups(linear) * group_bytes) {}

  static int64_t bytes_of_group(const OctavoLinear& linear, int64_t width) {
    return width * (linear.group + 3 * static_cast<int64_t>(sizeof(float)));
  }
  // Enough for any number of rows up to this.
  static int64_t bytes(const OctavoLinear& linear, int64_t rows) {
    return ceil_div(rows, kMaxWidth) * num_groups(linear) * bytes_of_group(linear, kMaxWidth);
  }
};

}  // namespace
}  // namespace octavo
