// Attention of a panel of rows by tiles of AMX (tiles.h), in BF16.
//
// The cache's tiles of keys, [dim / 2][16 tokens][2], are what a product of tiles takes; those of
// values, [8][width][2], too, 16 dims at a time.
#pragma once

#include "attention_panel.h"
#include "tiles.h"

namespace octavo {
namespace {  // see numbers.h

// Vectors of a CPU with AMX, and its tiles: those that run or emulated ones.
template <class Isa, class TilesOfIsa>
struct WithTiles : Isa {
  using Tiles = TilesOfIsa;
  static constexpr int kPanelRows = 16;

  // Of the tiles below: 5 and 7 multiply 16 tokens, 4 and 6 32 dims.
  static TileShapes shapes() { return TileShapes(5, 7, 32); }
};

constexpr int64_t kTileBytes = 64;  // a row of a tile

// Scores of the panel's rows against COUNT tiles of keys from `tile` on.
template <class Isa, int COUNT>
inline void score_by_tiles(const Piece<Isa>& piece, const Panel& panel, int64_t dim, int tile,
                           float* scores) {
  using Tiles = typename Isa::Tiles;
  constexpr int64_t stride = kScoreRow * sizeof(float), step_bytes = kTileBytes * kTile;
  const char* const queries = reinterpret_cast<const char*>(panel.queries);
  const auto keys = [&](int i) { return reinterpret_cast<const char*>(piece.keys[tile + i]); };
  Tiles::template zero<0>();
  Tiles::template zero<1>();
  for (int64_t step = 0; step < dim / 32; ++step) {
    for (int i = 0; piece.is_fresh && i < COUNT; ++i) {
      const char* const values = reinterpret_cast<const char*>(piece.values[tile + i]);
      for (int64_t at = step * step_bytes; at < (step + 1) * step_bytes; at += kTileBytes)
        __builtin_prefetch(values + at, 0, 3);
    }
    Tiles::template load<4>(queries + step * kTileBytes, dim * sizeof(bf16));
    Tiles::template load<6>(keys(0) + step * step_bytes, kTileBytes);
    Tiles::template dot_pairs<0, 4, 6>();
    if constexpr (COUNT == 2) {
      Tiles::template load<6>(keys(1) + step * step_bytes, kTileBytes);
      Tiles::template dot_pairs<1, 4, 6>();
    }
  }
  Tiles::template store<0>(scores + tile * kTile, stride);
  if constexpr (COUNT == 2) Tiles::template store<1>(scores + (tile + 1) * kTile, stride);
}

// A tile of values from `column` on, of which `tokens` have been written: what stands beside them
// may be anything, also no numbers, so that a weight of zero would not hide it.
template <class Isa>
inline const char* values_of(const Piece<Isa>& piece, int tile, int64_t tokens, int64_t width,
                             int64_t column, char* spare) {
  const bf16* const from = piece.values[tile] + column * 2;
  if (tokens >= kTile) return reinterpret_cast<const char*>(from);
  std::memset(spare, 0, kTile / 2 * width * 4);
  for (int64_t token = 0; token < tokens; ++token) {
    for (int64_t i = 0; i < width - column; ++i) {
      const int64_t at = (token / 2 * width + i) * 2 + token % 2;
      std::memcpy(spare + at * sizeof(bf16), from + at, sizeof(bf16));
    }
  }
  return spare;
}

// keep * sums + take * (exponents @ values) for COUNT tiles of 16 dims.
template <class Isa, int COUNT>
inline void weigh_by_tiles(const Piece<Isa>& piece, const Panel& panel, const float* exponents,
                           int first, int end, int64_t high, int64_t width, int64_t column,
                           const float* keep, const float* take) {
  using Tiles = typename Isa::Tiles;
  constexpr int64_t stride = kScoreRow * sizeof(float);
  alignas(64) char spare[kTile / 2 * kMaxDim * 4];
  alignas(64) float found[kTile][COUNT * kTile];
  Tiles::template zero<0>();
  Tiles::template zero<1>();
  Tiles::template zero<2>();
  Tiles::template zero<3>();
  for (int tile = first; tile < end; ++tile) {
    const int64_t tokens = least(piece.lanes[tile], high - tile * kTile);
    const char* const values = values_of(piece, tile, tokens, width, column, spare);
    const char* const weights = reinterpret_cast<const char*>(exponents) + tile * kTile * 2;
    const int64_t row = width * 4;
    Tiles::template load<5>(weights, stride);
    Tiles::template load<7>(values, row);
    Tiles::template dot_pairs<0, 5, 7>();
    if constexpr (COUNT > 1) {
      Tiles::template load<7>(values + kTileBytes, row);
      Tiles::template dot_pairs<1, 5, 7>();
    }
    if constexpr (COUNT > 2) {
      Tiles::template load<7>(values + 2 * kTileBytes, row);
      Tiles::template dot_pairs<2, 5, 7>();
    }
    if constexpr (COUNT > 3) {
      Tiles::template load<7>(values + 3 * kTileBytes, row);
      Tiles::template dot_pairs<3, 5, 7>();
    }
  }
  Tiles::template store<0>(found[0], sizeof *found);
  if constexpr (COUNT > 1) Tiles::template store<1>(found[0] + kTile, sizeof *found);
  if constexpr (COUNT > 2) Tiles::template store<2>(found[0] + 2 * kTile, sizeof *found);
  if constexpr (COUNT > 3) Tiles::template store<3>(found[0] + 3 * kTile, sizeof *found);
  for (int r = 0; r < panel.num_rows; ++r) {
    const auto kept = Isa::set(keep[r]), taken = Isa::set(take[r]);
    float* const target = panel.sums + r * width + column;
    for (int i = 0; i < COUNT * kTile; i += Isa::kWidth) {
      const auto before = Isa::mul(Isa::load(target + i), kept);
      Isa::store(target + i, Isa::fma(Isa::load(found[r] + i), taken, before));
    }
  }
}

// soften() for the panel's rows, some at a time.
template <class Isa, int ROWS = 4>
inline void soften_rows(int row, int num_rows, float* scores, float factor, int first, int end,
                        float* maximum, float* total) {
  for (; row + ROWS <= num_rows; row += ROWS)
    soften<Isa, ROWS>(scores + row * kScoreRow, factor, first, end, maximum + row, total + row);
  if constexpr (ROWS > 1)
    soften_rows<Isa, ROWS - 1>(row, num_rows, scores, factor, first, end, maximum, total);
}

template <class Isa>
void attend_panel_by_tiles(const Layer<Isa>& layer, const Piece<Isa>& piece, Panel& panel,
                           float* scores) {
  const int64_t low = largest(panel.low[0] - piece.base, 0);
  const int64_t high = least(panel.high[panel.num_rows - 1] - piece.base, kPiece);
  if (low >= high) return;
  const int first = static_cast<int>(low / kTile), end = static_cast<int>(ceil_div(high, kTile));
  int tile = first;
  for (; tile + 2 <= end; tile += 2)
    score_by_tiles<Isa, 2>(piece, panel, layer.dim(), tile, scores);
  if (tile < end) score_by_tiles<Isa, 1>(piece, panel, layer.dim(), tile, scores);

  const bool capped = layer.step.softcap != 0;
  for (int r = 0; r < panel.num_rows; ++r) {
    float* const row = scores + r * kScoreRow;
    if (capped) cap<Isa, 1>(piece.scale / layer.step.softcap, row, first, end);
    hide_unseen<Isa>(piece, row, first, end, panel.low[r] - piece.base,
                     panel.high[r] - piece.base);
  }
  alignas(64) float maximum[kLanes] = {}, total[kLanes] = {}, keep[kLanes], take[kLanes];
  const float factor = (capped ? layer.step.softcap : piece.scale) * kLog2e;
  soften_rows<Isa>(0, panel.num_rows, scores, factor, first, end, maximum, total);
  merge_totals<Isa>(panel.maximum, panel.total, maximum, total, keep, take);

  const int64_t width = layer.width();
  int64_t column = 0;
  for (; column + 4 * kTile <= width; column += 4 * kTile)
    weigh_by_tiles<Isa, 4>(piece, panel, scores, first, end, high, width, column, keep, take);
  for (; column < width; column += kTile)
    weigh_by_tiles<Isa, 1>(piece, panel, scores, first, end, high, width, column, keep, take);
}

template <class Isa, class TilesOfIsa>
struct Attend<WithTiles<Isa, TilesOfIsa>> {
  using Self = WithTiles<Isa, TilesOfIsa>;
  static void panel(const Layer<Self>& layer, const Piece<Self>& piece, Panel& panel,
                    float* scores) {
    attend_panel_by_tiles(layer, piece, panel, scores);
  }

  // Rows one after the other, as tiles take them.
  static void enter_query(const bf16* query, int64_t dim, int, int row, uint32_t* queries) {
    std::memcpy(queries + row * dim / 2, query, dim * sizeof(bf16));
  }
};

}  // namespace
}  // namespace octavo
