// Linears in BF16 by tiles (tiles.h), also of a single row: weights come from memory no faster than
// tiles are multiplied.
//
// `Isa`: vectors of 16, see vectors_avx512.h. `Tiles`: see tiles.h.
#pragma once

#include "linear.h"
#include "linear_scratch.h"
#include "tiles.h"

namespace octavo {
namespace {  // see numbers.h

constexpr int64_t kTileStride = kPanel * 4;  // bytes between rows of weights
constexpr int64_t kTileWeights = kStep16 / 2 * kTileStride;

// Inputs are read where they are, but for those that tiles cannot take from there: the rows of a
// last block that is not full, and all where a row is no whole number of tiles or rows would meet in
// so few sets of the L1 cache that they do not fit there.
template <class Isa, class Tiles>
class DenseTiles {
 public:
  explicit DenseTiles(const OctavoLinearCall& call)
      : call_(call),
        rows_(*call.rows),
        inputs_(call.linear->inputs),
        steps_(ceil_div(inputs_, kStep16)) {
    first_copied_ = copies_all_rows(*call.linear) ? 0 : rows_ / kTileRows * kTileRows;
  }

  void prepare() const {
    const int64_t size = inputs_ * sizeof(bf16);
#pragma omp for schedule(static)
    for (int64_t row = first_copied_; row < rows_; ++row) {
      char* const to = const_cast<char*>(inputs(row).at);
      copy_inputs(*call_.linear, static_cast<const bf16*>(call_.x) + row * inputs_,
                  reinterpret_cast<bf16*>(to));
      std::memset(to + size, 0, steps_ * kLine - size);
    }
  }

  // Half of an L2 cache of 2 MiB.
  int64_t chunk() const {
    return largest(1, (1 << 20) / (steps_ * kLine * 2 * kTileRows)) * 2 * kTileRows;
  }

  void multiply_rows(int64_t begin, int64_t end, int64_t panel) const {
    const int64_t size = dense_panel_bytes(*call_.linear);
    multiply_panel(begin, end, panel, static_cast<const char*>(call_.linear->weights) + panel * size,
                   size);
  }

 protected:
  const OctavoLinearCall& call_;

  // size: bytes from the panel's weights to those of the next one.
  void multiply_panel(int64_t begin, int64_t end, int64_t panel, const char* weights,
                      int64_t size) const {
    Ahead ahead{weights + (end - begin > 2 * kTileRows ? size : kAhead), kTileWeights};
    for (int64_t row = begin; row < end; row += 2 * kTileRows) {
      alignas(64) float sums[2 * kTileRows][kPanel];
      if (row > begin) {
        end - row > kTileRows ? sum_up<2, 0>(sums, row, weights, ahead)
                              : sum_up<1, 0>(sums, row, weights, ahead);
      } else {
        end - row > kTileRows ? sum_up<2, kLines>(sums, row, weights, ahead)
                              : sum_up<1, kLines>(sums, row, weights, ahead);
      }
      for (int64_t r = 0; r < least(2 * kTileRows, end - row); ++r) {
        typename Isa::Vec lanes[] = {Isa::load(sums[r]), Isa::load(sums[r] + Isa::kWidth)};
        finish<Isa>(call_, lanes, row + r, panel);
      }
    }
  }

 private:
  static constexpr int kLines = kTileWeights / kLine;
  static constexpr int64_t kAhead = 4096;

  struct Inputs {
    const char* at;
    int64_t stride;
  };
  Inputs inputs(int64_t row) const {
    if (row < first_copied_) {
      const int64_t stride = inputs_ * sizeof(bf16);
      return {static_cast<const char*>(call_.x) + row * stride, stride};
    }
    const int64_t stride = copied_row_bytes(*call_.linear);
    return {static_cast<const char*>(call_.scratch) + (row - first_copied_) * stride, stride};
  }

  // LINES: of weights that are fetched ahead at each step.
  template <int BLOCKS, int LINES>
  void sum_up(float (*sums)[kPanel], int64_t row, const char* weights, Ahead& ahead) const {
    const Inputs upper = inputs(row), lower = inputs(row + (BLOCKS - 1) * kTileRows);
    Tiles::template zero<0>();
    Tiles::template zero<1>();
    Tiles::template zero<2>();
    Tiles::template zero<3>();
    for (int64_t step = 0; step < steps_; ++step, weights += kTileWeights) {
      if constexpr (LINES) ahead.fetch<2, LINES>();
      Tiles::template load<4>(upper.at + step * kLine, upper.stride);
      Tiles::template load<6>(weights, kTileStride);
      Tiles::template load<7>(weights + kLine, kTileStride);
      Tiles::template dot_pairs<0, 4, 6>();
      Tiles::template dot_pairs<1, 4, 7>();
      if constexpr (BLOCKS == 2) {
        Tiles::template load<5>(lower.at + step * kLine, lower.stride);
        Tiles::template dot_pairs<2, 5, 6>();
        Tiles::template dot_pairs<3, 5, 7>();
      }
    }
    Tiles::template store<0>(sums[0], sizeof *sums);
    Tiles::template store<1>(sums[0] + kHalf, sizeof *sums);
    if constexpr (BLOCKS == 2) {
      Tiles::template store<2>(sums[kTileRows], sizeof *sums);
      Tiles::template store<3>(sums[kTileRows] + kHalf, sizeof *sums);
    }
  }

  const int64_t rows_, inputs_, steps_;
  int64_t first_copied_;
};

template <class Isa, class Tiles>
void multiply_dense_tiles(const void* arguments) {
  const typename Tiles::Session session{TileShapes()};
  multiply<DenseTiles<Isa, Tiles>>(arguments);
}

}  // namespace
}  // namespace octavo
