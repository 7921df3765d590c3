// Paged attention, for any instruction set: normalisation and rotation of queries and keys, the
// writing of the cache, attention. What an instruction set brings is a class `Isa` (see
// attention_avx512.cpp): its vectors of FP32 numbers, and products of a cache's elements.
//
// The cache of a block and kv head: its keys, then its values, in tiles of 16 tokens. A step of a
// product takes `Isa::kStep` elements (two BF16 numbers or one FP32 number, 32 bits in all). A tile
// of keys is [dim / kStep][16 tokens][kStep], a tile of values [16 / kStep][width][kStep] with
// `width`, dim rounded up to 16: scores and sums of values come as vectors, none across lanes.
//
// Places: a block is padded to whole tiles, and the place of a position counts this padding. A
// context is attended in pieces of 512 places from place 0: scores, their softmax and the sum of
// values of a piece, then pieces merged in order. Every query (a token's head, "row" here) goes
// through the same arithmetic whatever rows are computed beside it, so its result depends neither
// on the batch, nor on how a prompt was cut, nor on who computes which piece.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "octavo.h"

namespace octavo {
namespace {  // each source file has code of its own for its instruction set

constexpr int kTile = 16;
constexpr int kPiece = 512;
constexpr int kPieceTiles = kPiece / kTile;
constexpr int kMaxDim = 512;
constexpr int kTaskRows = 48;           // rows of a task: they share what they read of the cache
constexpr int kPanelRows = 6;           // rows whose sums are in registers together
constexpr int kPanels = kTaskRows / kPanelRows;
constexpr int kScoreRow = kPiece + 16;  // of a row's scores: rows do not meet at 4 KiB
constexpr int kLanes = 16;              // a panel's numbers, one a row, padded to any vector
constexpr float kLowest = -1e30f;       // a maximum before any score
constexpr float kLog2e = 1.44269504088896341f;

// Rows first_row .. first_row + num_rows of the matrix [query, head of the group] that a batch row
// has for a kv head, against pieces first_piece .. end_piece. `slot`: the first of the places for
// partial sums of these rows, -1 where the task finishes them. A merge is a task whose pieces have
// been computed, piece i in slots `slot + i * num_rows` on.
struct Task {
  int32_t row, head, first_row, num_rows, first_piece, end_piece, slot;
  float cost;
};
static_assert(sizeof(Task) == OCTAVO_ATTENTION_TASK_BYTES);

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t largest(int64_t a, int64_t b) { return a > b ? a : b; }

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
  Element* cache;
  const Element* qk_weight;
  const float* sinks;
  Element* out;

  int64_t dim() const { return step.head_dim; }
  int64_t width() const { return ceil_div(step.head_dim, kTile) * kTile; }
  int64_t token_width() const { return (step.num_heads + 2 * step.num_kv_heads) * dim(); }
  int64_t slot_floats() const { return width() + kLanes; }
  int64_t tile_elements() const { return kTile * width(); }
  int64_t block_tiles() const { return ceil_div(step.block_size, kTile); }
  // Tile 0 of a block's keys or, `kind` 1, values.
  Element* tiles(int64_t block, int64_t head, int kind) const {
    const int64_t index = (block * step.num_kv_heads + head) * 2 + kind;
    return cache + index * block_tiles() * tile_elements();
  }
};

// ---- vector functions ----

// 2^x with a relative error of 3e-7, exact at 0; 0 for x <= -200 and so for -inf; NaN for NaN.
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

// ---- new tokens: norm, rotation, cache ----

template <class Isa>
inline void widen(const typename Isa::Element* x, int64_t count, float* found) {
  int64_t i = 0;
  for (; i + Isa::kWidth <= count; i += Isa::kWidth) {
    Isa::store(found + i, Isa::load_elements(x + i));
  }
  for (; i < count; ++i) found[i] = to_float(x[i]);
}

// Writes x * scale.
template <class Isa>
inline void narrow(const float* x, float scale, int64_t count, typename Isa::Element* found) {
  int64_t i = 0;
  for (; i + Isa::kWidth <= count; i += Isa::kWidth) {
    Isa::store_elements(found + i, Isa::mul(Isa::load(x + i), Isa::set(scale)));
  }
  for (; i < count; ++i) found[i] = from_float<typename Isa::Element>(x[i] * scale);
}

template <class Isa>
inline void normalize(float* x, const typename Isa::Element* weight, int64_t dim, float eps) {
  auto squares = Isa::set(0.0f);
  int64_t i = 0;
  for (; i + Isa::kWidth <= dim; i += Isa::kWidth) {
    const auto v = Isa::load(x + i);
    squares = Isa::fma(v, v, squares);
  }
  float sum = Isa::sum(squares);
  for (; i < dim; ++i) sum = __builtin_fmaf(x[i], x[i], sum);
  const float scale = 1.0f / __builtin_sqrtf(sum / static_cast<float>(dim) + eps);
  float weights[kMaxDim];
  widen<Isa>(weight, dim, weights);
  for (int64_t j = 0; j < dim; ++j) x[j] = x[j] * scale * weights[j];
}

// Pairs (i, i + half) turn by their angle.
template <class Isa>
inline void rotate(float* x, const float* cos, const float* sin, int64_t half) {
  int64_t i = 0;
  for (; i + Isa::kWidth <= half; i += Isa::kWidth) {
    const auto c = Isa::load(cos + i), s = Isa::load(sin + i);
    const auto first = Isa::load(x + i), second = Isa::load(x + half + i);
    Isa::store(x + i, Isa::sub(Isa::mul(first, c), Isa::mul(second, s)));
    Isa::store(x + half + i, Isa::fma(second, c, Isa::mul(first, s)));
  }
  for (; i < half; ++i) {
    const float first = x[i], second = x[half + i];
    x[i] = first * cos[i] - second * sin[i];
    x[half + i] = second * cos[i] + first * sin[i];
  }
}

// Where a token's key and value stand in tiles of the cache.
struct Slot {
  int64_t block, tile, lane;

  Slot(const OctavoAttention& step, int64_t token)
      : block(step.slots[token] / step.block_size),
        tile(step.slots[token] % step.block_size / kTile),
        lane(step.slots[token] % step.block_size % kTile) {}
};

// Queries are rotated in place, keys and values written to the cache.
template <class Isa>
void enter_token(const Layer<Isa>& layer, int64_t token) {
  using Element = typename Isa::Element;
  constexpr int64_t kStep = Isa::kStep;
  const OctavoAttention& step = layer.step;
  const int64_t dim = layer.dim(), half = dim / 2, width = layer.width();
  const Slot slot(step, token);
  const int64_t tile = slot.tile * layer.tile_elements();
  Element* const heads = layer.qkv + token * layer.token_width();
  float x[kMaxDim];
  for (int64_t head = 0; head < step.num_heads + step.num_kv_heads; ++head) {
    Element* const source = heads + head * dim;
    widen<Isa>(source, dim, x);
    if (layer.qk_weight) {
      normalize<Isa>(x, layer.qk_weight + head * dim, dim, step.qk_norm_eps);
    }
    rotate<Isa>(x, step.cos + token * half, step.sin + token * half, half);
    narrow<Isa>(x, 1.0f, dim, source);
    if (head < step.num_heads) continue;
    Element* const keys = layer.tiles(slot.block, head - step.num_heads, 0) + tile;
    for (int64_t i = 0; i < dim; i += kStep) {
      std::memcpy(keys + i * kTile + slot.lane * kStep, source + i, kStep * sizeof(Element));
    }
  }
  for (int64_t head = 0; head < step.num_kv_heads; ++head) {
    const Element* const source = heads + (step.num_heads + step.num_kv_heads + head) * dim;
    Element* const values = layer.tiles(slot.block, head, 1) + tile;
    Element* const target = values + slot.lane / kStep * width * kStep + slot.lane % kStep;
    for (int64_t i = 0; i < dim; ++i) target[i * kStep] = source[i];
  }
}

// ---- attention of a panel against a piece ----

// The tiles of a batch row's piece; those that nobody sees are not set.
template <class Isa>
struct Piece {
  using Element = typename Isa::Element;
  int64_t base;   // its first place
  bool is_fresh;  // no panel has read it: what is read next is fetched ahead
  const Element* keys[kPieceTiles];
  const Element* values[kPieceTiles];
  int32_t lanes[kPieceTiles];  // tokens a tile has, less than 16 at the end of an uneven block
};

// Up to six rows. Queries are [dim / kStep][rows][kStep]; numbers of rows stand in lanes. `maximum`
// and `total`, of the exponents so far, are in powers of two.
struct Panel {
  int num_rows;
  int64_t low[kLanes], high[kLanes];  // places seen; both rise with the row
  const uint32_t* queries;
  alignas(64) float maximum[kLanes];
  alignas(64) float total[kLanes];
  float* sums;  // [rows][width]
};

// Scores of kRows rows against kVectors vectors of keys from tile `tile` on, [kRows][kScoreRow].
template <class Isa, int kRows, int kVectors>
inline void score_tiles(const Piece<Isa>& piece, const uint32_t* queries, int64_t steps, int tile,
                        int next, float* scores) {
  constexpr int kPerTile = kTile / Isa::kWidth, kTiles = kVectors / kPerTile;
  constexpr int kRow = kTile * Isa::kStep;  // elements of a step
  typename Isa::Vec sums[kRows][kVectors];
  for (auto& row : sums) {
    for (auto& sum : row) sum = Isa::set(0.0f);
  }
  const typename Isa::Element* keys[kVectors];
  for (int v = 0; v < kVectors; ++v) {
    keys[v] = piece.keys[tile + v / kPerTile] + v % kPerTile * Isa::kWidth * Isa::kStep;
  }
  for (int64_t s = 0; s < steps; ++s) {
    for (int t = 0; piece.is_fresh && t < kTiles; ++t) {
      __builtin_prefetch(piece.keys[next + t] + s * kRow, 0, 3);
      __builtin_prefetch(piece.values[tile + t] + s * kRow, 0, 2);
    }
    typename Isa::Operand key[kVectors];
    for (int v = 0; v < kVectors; ++v) key[v] = Isa::operand(keys[v] + s * kRow);
    for (int r = 0; r < kRows; ++r) {
      const auto query = Isa::broadcast(queries + s * kRows + r);
      for (int v = 0; v < kVectors; ++v) sums[r][v] = Isa::dot(sums[r][v], key[v], query);
    }
  }
  for (int r = 0; r < kRows; ++r) {
    float* const row = scores + r * kScoreRow + tile * kTile;
    for (int v = 0; v < kVectors; ++v) Isa::store(row + v * Isa::kWidth, sums[r][v]);
  }
}

template <class Isa, int kRows>
void score(const Piece<Isa>& piece, const uint32_t* queries, int64_t steps, int first, int end,
           float* scores) {
  constexpr int kPerTile = kTile / Isa::kWidth;
  constexpr int kMost = Isa::kVectors / kPerTile;  // tiles at once
  int tile = first;
  for (; tile + kMost <= end; tile += kMost) {
    const int next = tile + 2 * kMost <= end ? tile + kMost : end - kMost;
    score_tiles<Isa, kRows, Isa::kVectors>(piece, queries, steps, tile, next, scores);
  }
  for (; tile < end; ++tile) {
    const int next = tile + 1 < end ? tile + 1 : tile;
    score_tiles<Isa, kRows, kPerTile>(piece, queries, steps, tile, next, scores);
  }
}

inline void hide(float* scores, int64_t from, int64_t to) {
  for (int64_t i = from; i < to; ++i) scores[i] = -__builtin_inff();
}

// The places of tiles first .. end that a row does not see: those outside of low .. high, and the
// padding of blocks.
template <class Isa>
inline void hide_unseen(const Piece<Isa>& piece, float* scores, int first, int end, int64_t low,
                        int64_t high) {
  const int64_t from = first * kTile, to = end * kTile;
  hide(scores, from, least(low, to));
  hide(scores, largest(high, from), to);
  for (int tile = first; tile < end; ++tile) {
    if (piece.lanes[tile] < kTile) {
      hide(scores, tile * kTile + piece.lanes[tile], (tile + 1) * kTile);
    }
  }
}

// Scores of kRows rows become softcap * tanh(scale / softcap * score), but for the first factor.
template <class Isa, int kRows>
void cap(const OctavoAttention& step, float* scores, int first, int end) {
  const auto inner = Isa::set(step.scale / step.softcap);
  for (int r = 0; r < kRows; ++r) {
    float* const row = scores + r * kScoreRow;
    for (int i = first * kTile; i < end * kTile; i += Isa::kWidth) {
      Isa::store(row + i, tanh<Isa>(Isa::mul(Isa::load(row + i), inner)));
    }
  }
}

// Scores of tiles first .. end become exponents (as elements, at the start of each row); times
// `factor` they are in powers of two, as are the rows' maxima. Rows take turns, since operations of
// one row wait for each other. Not inlined: it would take registers from the products around it.
template <class Isa, int kRows>
__attribute__((noinline)) void soften(float* scores, float factor, int first, int end,
                                      float* maximum, float* total) {
  using Vec = typename Isa::Vec;
  const int from = first * kTile, to = end * kTile;
  Vec highest[kRows], shift[kRows], sum[kRows];
  for (int r = 0; r < kRows; ++r) {
    highest[r] = Isa::set(-__builtin_inff());
    sum[r] = Isa::set(0.0f);
  }
  for (int i = from; i < to; i += Isa::kWidth) {
    for (int r = 0; r < kRows; ++r) {
      highest[r] = Isa::max(highest[r], Isa::load(scores + r * kScoreRow + i));
    }
  }
  for (int r = 0; r < kRows; ++r) {
    const float scaled = Isa::highest(highest[r]) * factor;
    maximum[r] = scaled > kLowest ? scaled : kLowest;
    shift[r] = Isa::set(-maximum[r]);
  }
  const Vec scale = Isa::set(factor);
  for (int i = from; i < to; i += Isa::kWidth) {
    for (int r = 0; r < kRows; ++r) {
      float* const row = scores + r * kScoreRow;
      const Vec exponent = exp2<Isa>(Isa::fma(Isa::load(row + i), scale, shift[r]));
      sum[r] = Isa::add(sum[r], exponent);
      Isa::store_elements(reinterpret_cast<typename Isa::Element*>(row) + i, exponent);
    }
  }
  for (int r = 0; r < kRows; ++r) total[r] = Isa::sum(sum[r]);
}

// keep * sums + take * (exponents @ values) for kRows rows and kVectors vectors of dims.
template <class Isa, int kRows, int kVectors>
inline void weigh_columns(const Piece<Isa>& piece, const float* exponents, int first, int end,
                          int64_t low, int64_t high, int64_t width, int64_t column,
                          const float* keep, const float* take, float* sums) {
  constexpr int kStep = Isa::kStep;
  typename Isa::Vec found[kRows][kVectors];
  for (auto& row : found) {
    for (auto& sum : row) sum = Isa::set(0.0f);
  }
  for (int tile = first; tile < end; ++tile) {
    const int64_t start = tile * kTile;
    const int64_t tokens = least(piece.lanes[tile], high - start);
    const float* weights = exponents + start / kStep;
    const auto* values = piece.values[tile] + column * kStep;
    // `half`: the last token of an odd number; what stands beside it may be anything.
    const auto add = [&](int64_t s, auto half) {
      typename Isa::Operand value[kVectors];
      for (int v = 0; v < kVectors; ++v) {
        const auto* source = values + (s * width + v * Isa::kWidth) * kStep;
        if constexpr (decltype(half)::value) {
          value[v] = Isa::first_half(source);
        } else {
          value[v] = Isa::operand(source);
        }
      }
      for (int r = 0; r < kRows; ++r) {
        const auto weight = Isa::broadcast(weights + r * kScoreRow + s);
        for (int v = 0; v < kVectors; ++v) found[r][v] = Isa::dot(found[r][v], value[v], weight);
      }
    };
    int64_t s = largest(0, low - start) / kStep;
    for (; s < tokens / kStep; ++s) add(s, std::false_type());
    if constexpr (kStep == 2) {
      if (tokens % 2) add(s, std::true_type());
    }
  }
  for (int r = 0; r < kRows; ++r) {
    for (int v = 0; v < kVectors; ++v) {
      float* const target = sums + r * width + column + v * Isa::kWidth;
      const auto kept = Isa::mul(Isa::load(target), Isa::set(keep[r]));
      Isa::store(target, Isa::fma(found[r][v], Isa::set(take[r]), kept));
    }
  }
}

// A running (maximum, total) and another: both become the running one, whose sums are `keep` times
// its own and `take` times the other's.
template <class Isa>
inline void merge_totals(float* maximum, float* total, const float* other_maximum,
                         const float* other_total, float* keep, float* take) {
  for (int i = 0; i < kLanes; i += Isa::kWidth) {
    const auto before = Isa::load(maximum + i), other = Isa::load(other_maximum + i);
    const auto both = Isa::max(before, other);
    const auto kept = exp2<Isa>(Isa::sub(before, both));
    const auto taken = exp2<Isa>(Isa::sub(other, both));
    const auto sum = Isa::mul(Isa::load(total + i), kept);
    Isa::store(maximum + i, both);
    Isa::store(total + i, Isa::fma(Isa::load(other_total + i), taken, sum));
    Isa::store(keep + i, kept);
    Isa::store(take + i, taken);
  }
}

template <class Isa, int kRows>
void attend_panel(const Layer<Isa>& layer, const Piece<Isa>& piece, Panel& panel, float* scores) {
  const int64_t low = largest(panel.low[0] - piece.base, 0);
  const int64_t high = least(panel.high[kRows - 1] - piece.base, kPiece);
  if (low >= high) return;
  const int first = static_cast<int>(low / kTile), end = static_cast<int>(ceil_div(high, kTile));
  score<Isa, kRows>(piece, panel.queries, layer.dim() / Isa::kStep, first, end, scores);
  alignas(64) float maximum[kLanes] = {}, total[kLanes] = {}, keep[kLanes], take[kLanes];
  const bool capped = layer.step.softcap != 0;
  if (capped) cap<Isa, kRows>(layer.step, scores, first, end);
  for (int r = 0; r < kRows; ++r) {
    hide_unseen<Isa>(piece, scores + r * kScoreRow, first, end, panel.low[r] - piece.base,
                     panel.high[r] - piece.base);
  }
  const float factor = (capped ? layer.step.softcap : layer.step.scale) * kLog2e;
  soften<Isa, kRows>(scores, factor, first, end, maximum, total);
  merge_totals<Isa>(panel.maximum, panel.total, maximum, total, keep, take);

  const int64_t width = layer.width();
  const auto weigh = [&](int64_t column, auto vectors) {
    weigh_columns<Isa, kRows, decltype(vectors)::value>(piece, scores, first, end, low, high, width,
                                                        column, keep, take, panel.sums);
  };
  constexpr int kMost = Isa::kVectors, kLeast = kTile / Isa::kWidth;
  int64_t column = 0;
  for (; column + kMost * Isa::kWidth <= width; column += kMost * Isa::kWidth) {
    weigh(column, std::integral_constant<int, kMost>());
  }
  for (; column < width; column += kTile) weigh(column, std::integral_constant<int, kLeast>());
}

template <class Isa>
void attend_panel(const Layer<Isa>& layer, const Piece<Isa>& piece, Panel& panel, float* scores) {
  using Attend = void (*)(const Layer<Isa>&, const Piece<Isa>&, Panel&, float*);
  static constexpr Attend kAttend[] = {attend_panel<Isa, 1>, attend_panel<Isa, 2>,
                                       attend_panel<Isa, 3>, attend_panel<Isa, 4>,
                                       attend_panel<Isa, 5>, attend_panel<Isa, 6>};
  kAttend[panel.num_rows - 1](layer, piece, panel, scores);
}

// ---- tasks ----

// The rows of a task and what is summed for them, on the stack of the thread.
template <class Isa>
struct Work {
  using Element = typename Isa::Element;
  alignas(64) float scores[kPanelRows * kScoreRow];
  alignas(64) float sums[kTaskRows * kMaxDim];
  alignas(64) uint32_t queries[kTaskRows * kMaxDim / Isa::kStep];
  Panel panels[kPanels];
  int num_panels;

  // Cuts the task's rows into panels of like size; nothing is summed yet.
  void start(const Layer<Isa>& layer, const Task& task) {
    num_panels = static_cast<int>(ceil_div(task.num_rows, kPanelRows));
    for (int i = 0; i < num_panels; ++i) {
      const int64_t from = i * task.num_rows / num_panels;
      Panel& panel = panels[i];
      panel.num_rows = static_cast<int>((i + 1) * task.num_rows / num_panels - from);
      panel.sums = sums + from * layer.width();
      panel.queries = queries + from * layer.dim() / Isa::kStep;
      for (int r = 0; r < kLanes; ++r) {
        panel.maximum[r] = kLowest;
        panel.total[r] = 0;
      }
    }
    std::memset(sums, 0, sizeof(float) * task.num_rows * layer.width());
  }

  void load_queries(const Layer<Isa>& layer, const Task& task) {
    const Context context(layer.step, task.row);
    const int64_t dim = layer.dim(), steps = dim / Isa::kStep;
    int64_t row = task.first_row;
    for (int i = 0; i < num_panels; ++i) {
      Panel& panel = panels[i];
      uint32_t* const target = queries + (panel.queries - queries);
      for (int r = 0; r < panel.num_rows; ++r, ++row) {
        panel.low[r] = context.low(row);
        panel.high[r] = context.high(row);
        const int64_t token = layer.step.query_starts[task.row] + row / context.group;
        const int64_t head = task.head * context.group + row % context.group;
        const Element* const query = layer.qkv + token * layer.token_width() + head * dim;
        for (int64_t s = 0; s < steps; ++s) {
          std::memcpy(target + s * panel.num_rows + r, query + s * Isa::kStep, sizeof(uint32_t));
        }
      }
    }
  }
};

template <class Isa>
void find_tiles(const Layer<Isa>& layer, const Task& task, int64_t index, int64_t end_place,
                Piece<Isa>& piece) {
  const int64_t block_tiles = layer.block_tiles(), uneven = layer.step.block_size % kTile;
  const int32_t* const table = layer.step.block_tables + task.row * layer.step.table_width;
  piece.base = index * kPiece;
  const int64_t first = index * kPieceTiles;
  const int64_t count = least(kPieceTiles, ceil_div(end_place, kTile) - first);
  const int64_t low = Context(layer.step, task.row).low(task.first_row);
  for (int64_t i = largest(0, low / kTile - first); i < count; ++i) {
    const int64_t block = table[(first + i) / block_tiles], tile = (first + i) % block_tiles;
    const int64_t offset = tile * layer.tile_elements();
    piece.keys[i] = layer.tiles(block, task.head, 0) + offset;
    piece.values[i] = layer.tiles(block, task.head, 1) + offset;
    piece.lanes[i] = static_cast<int32_t>(uneven && tile == block_tiles - 1 ? uneven : kTile);
  }
}

// The finished rows of a panel; `row`: that of the task's matrix where it starts.
template <class Isa>
void finish_panel(const Layer<Isa>& layer, const Task& task, int64_t row, Panel& panel) {
  const OctavoAttention& step = layer.step;
  const int64_t dim = layer.dim(), width = layer.width();
  const int64_t group = step.num_heads / step.num_kv_heads;
  alignas(64) float keep[kLanes], take[kLanes], sink[kLanes], one[kLanes];
  for (int r = 0; r < kLanes; ++r) {
    keep[r] = one[r] = 1;
    sink[r] = kLowest;
  }
  if (layer.sinks) {
    for (int r = 0; r < panel.num_rows; ++r) {
      sink[r] = layer.sinks[task.head * group + (row + r) % group] * kLog2e;
    }
    merge_totals<Isa>(panel.maximum, panel.total, sink, one, keep, take);
  }
  for (int r = 0; r < panel.num_rows; ++r) {
    const int64_t token = step.query_starts[task.row] + (row + r) / group;
    const int64_t head = task.head * group + (row + r) % group;
    const float scale = keep[r] / panel.total[r];
    auto* const target = layer.out + (token * step.num_heads + head) * dim;
    narrow<Isa>(panel.sums + r * width, scale, dim, target);
  }
}

template <class Isa>
void finish(const Layer<Isa>& layer, const Task& task, Work<Isa>& work) {
  int64_t row = task.first_row;
  for (int i = 0; i < work.num_panels; ++i) {
    finish_panel<Isa>(layer, task, row, work.panels[i]);
    row += work.panels[i].num_rows;
  }
}

template <class Isa>
void attend(const Layer<Isa>& layer, const Task& task) {
  Work<Isa> work;
  Piece<Isa> piece;
  work.start(layer, task);
  work.load_queries(layer, task);
  const Panel& last = work.panels[work.num_panels - 1];
  const int64_t end_place = last.high[last.num_rows - 1];
  for (int64_t index = task.first_piece; index < task.end_piece; ++index) {
    find_tiles<Isa>(layer, task, index, end_place, piece);
    for (int i = 0; i < work.num_panels; ++i) {
      piece.is_fresh = i == 0;
      attend_panel<Isa>(layer, piece, work.panels[i], work.scores);
    }
  }
  if (task.slot < 0) {
    finish<Isa>(layer, task, work);
    return;
  }
  float* slot = layer.step.partials + task.slot * layer.slot_floats();
  for (int i = 0; i < work.num_panels; ++i) {
    const Panel& panel = work.panels[i];
    for (int r = 0; r < panel.num_rows; ++r, slot += layer.slot_floats()) {
      std::memcpy(slot, panel.sums + r * layer.width(), sizeof(float) * layer.width());
      slot[layer.width()] = panel.maximum[r];
      slot[layer.width() + 1] = panel.total[r];
    }
  }
}

// Merges what tasks of one piece each have left in slots, in order.
template <class Isa>
void merge(const Layer<Isa>& layer, const Task& task) {
  Work<Isa> work;
  work.start(layer, task);
  const int64_t width = layer.width();
  const float* slot = layer.step.partials + task.slot * layer.slot_floats();
  alignas(64) float maximum[kLanes] = {}, total[kLanes] = {}, keep[kLanes], take[kLanes];
  for (int64_t index = task.first_piece; index < task.end_piece; ++index) {
    for (int i = 0; i < work.num_panels; ++i) {
      Panel& panel = work.panels[i];
      for (int r = 0; r < panel.num_rows; ++r) {
        maximum[r] = slot[r * layer.slot_floats() + width];
        total[r] = slot[r * layer.slot_floats() + width + 1];
      }
      merge_totals<Isa>(panel.maximum, panel.total, maximum, total, keep, take);
      for (int r = 0; r < panel.num_rows; ++r, slot += layer.slot_floats()) {
        for (int64_t j = 0; j < width; j += Isa::kWidth) {
          float* const target = panel.sums + r * width + j;
          const auto kept = Isa::mul(Isa::load(target), Isa::set(keep[r]));
          Isa::store(target, Isa::fma(Isa::load(slot + j), Isa::set(take[r]), kept));
        }
      }
    }
  }
  finish<Isa>(layer, task, work);
}

template <class Isa>
void attention(const OctavoAttention& step, typename Isa::Element* qkv,
               typename Isa::Element* cache, const typename Isa::Element* qk_weight,
               const float* sinks, typename Isa::Element* out) {
  const Layer<Isa> layer{step, qkv, cache, qk_weight, sinks, out};
  const Task* const tasks = static_cast<const Task*>(step.tasks);
  const Task* const merges = tasks + step.num_tasks;
#pragma omp parallel
  {
#pragma omp for schedule(static)
    for (int64_t token = 0; token < step.num_tokens; ++token) enter_token<Isa>(layer, token);
#pragma omp for schedule(dynamic, 1)
    for (int64_t i = 0; i < step.num_tasks; ++i) attend<Isa>(layer, tasks[i]);
#pragma omp for schedule(dynamic, 1)
    for (int64_t i = 0; i < step.num_merges; ++i) merge<Isa>(layer, merges[i]);
  }
}

}  // namespace
}  // namespace octavo
