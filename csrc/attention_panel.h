// Attention of a panel of rows against a piece of their context.
#pragma once

#include <cstring>
#include <type_traits>

#include "attention_layout.h"
#include "vector_math.h"

namespace octavo {
namespace {  // see numbers.h

// The tiles of a batch row's piece; those that nobody sees are not set.
template <class Isa>
struct Piece {
  using Element = typename Isa::Element;
  int64_t base;   // its first place
  float scale;    // of scores
  bool is_fresh;  // no panel has read it: what is read next is fetched ahead
  const Element* keys[kPieceTiles];
  const Element* values[kPieceTiles];
  int32_t lanes[kPieceTiles];  // tokens a tile has, less than 16 at the end of an uneven block
};

// Up to kPanelRows rows. Queries are as Attend::enter_query puts them; numbers of rows stand in
// lanes. `maximum` and `total`, of the exponents so far, are in powers of two.
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

// Scores of kRows rows become tanh(factor * score).
template <class Isa, int kRows>
void cap(float factor, float* scores, int first, int end) {
  const auto inner = Isa::set(factor);
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
      Isa::store(reinterpret_cast<typename Isa::Element*>(row) + i, exponent);
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
  if (capped) cap<Isa, kRows>(piece.scale / layer.step.softcap, scores, first, end);
  for (int r = 0; r < kRows; ++r) {
    hide_unseen<Isa>(piece, scores + r * kScoreRow, first, end, panel.low[r] - piece.base,
                     panel.high[r] - piece.base);
  }
  const float factor = (capped ? layer.step.softcap : piece.scale) * kLog2e;
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

// What an instruction set does in a way of its own, and here how vectors do it.
template <class Isa>
struct Attend {
  static void panel(const Layer<Isa>& layer, const Piece<Isa>& piece, Panel& panel,
                    float* scores) {
    using Rows = void (*)(const Layer<Isa>&, const Piece<Isa>&, Panel&, float*);
    static_assert(Isa::kPanelRows == 6);
    static constexpr Rows kRows[] = {attend_panel<Isa, 1>, attend_panel<Isa, 2>,
                                     attend_panel<Isa, 3>, attend_panel<Isa, 4>,
                                     attend_panel<Isa, 5>, attend_panel<Isa, 6>};
    kRows[panel.num_rows - 1](layer, piece, panel, scores);
  }

  // Puts a row of a panel of `num_rows`: [dim / kStep][rows][kStep].
  static void enter_query(const typename Isa::Element* query, int64_t dim, int num_rows, int row,
                          uint32_t* queries) {
    for (int64_t s = 0; s < dim / Isa::kStep; ++s)
      std::memcpy(queries + s * num_rows + row, query + s * Isa::kStep, sizeof(uint32_t));
  }
};

}  // namespace
}  // namespace octavo
