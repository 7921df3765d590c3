// What a linear writes down of its inputs before it multiplies them.
#pragma once

#include "linear.h"

namespace octavo {
namespace {  // see numbers.h

constexpr int64_t kConflict = 2048;  // bytes: rows a multiple of these apart meet in a cache
constexpr int64_t kApart = 64;       // bytes between rows that would

inline bool rows_conflict(const OctavoLinear& linear) {
  return linear.inputs * element_size(linear) % kConflict == 0;
}
// Whether tiles of AMX can take no inputs in BF16 from where they are.
inline bool copies_all_rows(const OctavoLinear& linear) {
  return linear.inputs % kStep16 || rows_conflict(linear) || linear.order;
}
// A row's inputs, in the order of the weights.
template <class T>
inline void copy_inputs(const OctavoLinear& linear, const T* from, T* to) {
  if (!linear.order) {
    std::memcpy(to, from, linear.inputs * sizeof(T));
    return;
  }
  for (int64_t i = 0; i < linear.inputs; ++i) to[i] = from[linear.order[i]];
}
inline int64_t copied_row_bytes(const OctavoLinear& linear) {
  return ceil_div(linear.inputs, kStep16) * kLine + kApart;
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

// For tiles of AMX they lie in blocks of 16 rows, [groups] of: scales [16]; sums [16]; inputs
// [16][group].
constexpr int64_t kTileRows = 16;

struct TileLayout {
  static constexpr int64_t kScalesBytes = 2 * kTileRows * sizeof(float);
  static constexpr int64_t kMostUnpacked = 1 << 19;  // bytes of a panel's codes, on the stack

  int64_t group_bytes, block_bytes;
  explicit TileLayout(const OctavoLinear& linear)
      : group_bytes(kScalesBytes + kTileRows * linear.group),
        block_bytes(num_groups(linear) * group_bytes) {}

  // Whether groups are whole tiles and codes less their zero signed bytes.
  static bool fits(const OctavoLinear& linear) {
    return (linear.group <= 64 || linear.group % 64 == 0) &&
           (linear.bits == 4 || linear.zero == 128) &&
           num_groups(linear) * linear.group * 32 <= kMostUnpacked;
  }
  static int64_t bytes(const OctavoLinear& linear, int64_t rows) {
    return fits(linear) ? ceil_div(rows, kTileRows) * TileLayout(linear).block_bytes : 0;
  }
};

}  // namespace
}  // namespace octavo
