// What attention's kernels and their plan agree on.
//
// The cache of a block and kv head: its keys, then its values, in tiles of 16 tokens. A step of a
// product takes `Isa::kStep` elements (two BF16 numbers or one FP32 number, 32 bits in all). A tile
// of keys is [dim / kStep][16 tokens][kStep], a tile of values [16 / kStep][width][kStep] with
// `width`, dim rounded up to 16: scores and sums of values come as vectors, none across lanes.
//
// A cache of 8 bits holds the same tiles with a byte for each number; int8, after them the scales of
// their 16 tokens.
//
// Places: a block is padded to whole tiles, and the place of a position counts this padding. A
// context is attended in pieces of 512 places from place 0: scores, their softmax and the sum of
// values of a piece, then pieces merged in order. Every query (a token's head, "row" here) goes
// through the same arithmetic whatever rows are computed beside it, so its result depends neither
// on the batch, nor on how a prompt was cut, nor on who computes which piece.
#pragma once

#include <cstdint>

#include "octavo.h"

namespace octavo {
namespace {  // see numbers.h

constexpr int kTile = 16;
constexpr int kPiece = 512;
constexpr int kPieceTiles = kPiece / kTile;
constexpr int kMaxDim = 512;
constexpr int kTaskRows = 48;           // rows of a task: they share what they read of the cache
constexpr int kScoreRow = kPiece + 16;  // of a row's scores: rows do not meet at 4 KiB
constexpr int kLanes = 16;              // a panel's numbers, one a row, padded to any vector
constexpr float kLowest = -1e30f;       // a maximum before any score

// Rows first_row .. first_row + num_rows of the matrix [query, head of the group] that a batch row
// has for a kv head, against pieces first_piece .. end_piece. `slot`: the first of the places for
// partial sums of these rows, -1 where the task finishes them. A merge is a task whose pieces have
// been computed, piece i in slots `slot + i * num_rows` on.
struct Task {
  int32_t row, head, first_row, num_rows, first_piece, end_piece, slot;
  float cost;
};
static_assert(sizeof(Task) == OCTAVO_ATTENTION_TASK_BYTES);

// Positions and places of one batch row.
struct Context {
  int64_t block_size, block_places, group, window, past;

  Context(const OctavoAttention& step, int64_t row)
      : block_size(step.block_size),
        block_places(ceil_div(block_size, kTile) * kTile),
        group(step.num_heads / step.num_kv_heads),
        window(step.window),
        past(step.seq_lens[row] - (step.query_starts[row + 1] - step.query_starts[row])) {}

  int64_t place(int64_t position) const {
    return position / block_size * block_places + position % block_size;
  }
  // The places that a row of [query, head] sees: low .. high.
  int64_t low(int64_t matrix_row) const {
    const int64_t position = past + matrix_row / group;
    return window ? place(largest(0, position - window + 1)) : 0;
  }
  int64_t high(int64_t matrix_row) const { return place(past + matrix_row / group) + 1; }
};

template <class Isa>
struct Layer {
  using Element = typename Isa::Element;
  const OctavoAttention& step;
  Element* qkv;
  char* cache;
  const Element* qk_weight;
  const float* sinks;
  const float* kv_scales;
  Element* out;

  int64_t dim() const { return step.head_dim; }
  int64_t width() const { return ceil_div(step.head_dim, kTile) * kTile; }
  int64_t token_width() const { return (step.num_heads + 2 * step.num_kv_heads) * dim(); }
  int64_t slot_floats() const { return width() + kLanes; }
  int64_t tile_elements() const { return kTile * width(); }
  int64_t tile_bytes() const {
    const int64_t size = step.kept ? 1 : sizeof(Element);
    return tile_elements() * size + (step.kept == OCTAVO_KEPT_INT8 ? kTile * sizeof(float) : 0);
  }
  int64_t block_tiles() const { return ceil_div(step.block_size, kTile); }
  // Of a head's keys or, `kind` 1, values, times which the cache holds them.
  float kept_scale(int64_t head, int kind) const {
    return kv_scales ? kv_scales[kind * step.num_kv_heads + head] : 1.0f;
  }
  // A tile of a block's keys or, `kind` 1, values.
  char* tile(int64_t block, int64_t head, int kind, int64_t index) const {
    const int64_t first = ((block * step.num_kv_heads + head) * 2 + kind) * block_tiles();
    return cache + (first + index) * tile_bytes();
  }
};

}  // namespace
}  // namespace octavo
