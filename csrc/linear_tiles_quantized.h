// Linears on quantized weights by tiles (tiles.h): the same numbers as linear_quantized.h, bit for
// bit, whose products are exact too.
//
// `Isa`: vectors of 16, see linear_quantized.h. `Tiles`: see tiles.h.
#pragma once

#include "linear_quantized.h"
#include "linear_scratch.h"
#include "tiles.h"

namespace octavo {
namespace {  // see numbers.h

template <class Isa, class Tiles, int BITS>
class QuantizedTiles {
 public:
  explicit QuantizedTiles(const OctavoLinearCall& call)
      : call_(call),
        linear_(*call.linear),
        layout_(linear_),
        groups_(num_groups(linear_)),
        weights_(linear_),
        step_(least(linear_.group, kLine)) {}

  void prepare() const {
    if (linear_.element == OCTAVO_BF16) {
      round_rows(static_cast<const bf16*>(call_.x));
    } else {
      round_rows(static_cast<const float*>(call_.x));
    }
  }

  // A quarter of an L2 cache of 2 MiB.
  int64_t chunk() const { return largest(1, (1 << 19) / layout_.block_bytes) * kTileRows; }

  void multiply_rows(int64_t begin, int64_t end, int64_t panel) const {
    const char* const weights =
        static_cast<const char*>(linear_.weights) + panel * groups_ * weights_.group;
    char* const codes = static_cast<char*>(
        __builtin_alloca_with_align(groups_ * linear_.group * kPanel, 8 * kLine));
    unpack(weights, codes);
    for (int64_t row = begin; row < end; row += kTileRows) {
      alignas(64) float sums[2][kTileRows][kHalf];
      for (int half = 0; half < 2; ++half) {
        // The next panel, half of it with each half of the first rows.
        const char* next = row > begin ? nullptr : weights + groups_ * weights_.group;
        sum_up(sums[half], inputs(row / kTileRows), weights, codes, half, next);
      }
      for (int64_t r = 0; r < least(kTileRows, end - row); ++r) {
        Vec lanes[] = {Isa::load(sums[0][r]), Isa::load(sums[1][r])};
        finish<Isa>(call_, lanes, row + r, panel);
      }
    }
  }

 private:
  using Vec = typename Isa::Vec;
  static constexpr int64_t kStride = kPanel * 4;  // bytes between rows of weights

  const char* inputs(int64_t block) const {
    return static_cast<const char*>(call_.scratch) + block * layout_.block_bytes;
  }

  void sum_up(float (*to)[kHalf], const char* x, const char* weights, const char* codes,
              int half, const char* next) const {
    alignas(64) int32_t dots[kTileRows][kHalf];
    Vec sums[kTileRows];
#pragma GCC unroll 16
    for (int r = 0; r < kTileRows; ++r) sums[r] = Isa::set(0.0f);
    for (int64_t g = 0; g < groups_; ++g, x += layout_.group_bytes) {
      if (next) {
        for (int64_t at = half * kLine; at < weights_.group; at += 2 * kLine)
          __builtin_prefetch(next + g * weights_.group + at, 0, 2);
      }
      multiply_group(x + TileLayout::kScalesBytes,
                     codes + g * linear_.group * kPanel + half * kLine);
      Tiles::template store<0>(dots, sizeof *dots);

      const char* const header = weights + g * weights_.group;
      const float* const scales = reinterpret_cast<const float*>(x);
      const Vec scale = scales_of<Isa>(linear_, header, half);
#pragma GCC unroll 16
      for (int r = 0; r < kTileRows; ++r) {
        const Vec both = Isa::mul(scale, Isa::set(scales[r]));
        sums[r] = Isa::fma(both, Isa::floats(Isa::load_bits(dots[r])), sums[r]);
      }
      if (!linear_.has_minimums && !linear_.has_zeros) continue;
      const Vec minimum = minimums<Isa>(linear_, weights_, header, half);
#pragma GCC unroll 16
      for (int r = 0; r < kTileRows; ++r)
        sums[r] = Isa::fma(minimum, Isa::set(scales[kTileRows + r]), sums[r]);
    }
#pragma GCC unroll 16
    for (int r = 0; r < kTileRows; ++r) Isa::store(to[r], sums[r]);
  }

  // A group's exact sums, in tile 0.
  OCTAVO_INLINE void multiply_group(const char* x, const char* codes) const {
    Tiles::template zero<0>();
    for (int64_t i = 0; i < linear_.group; i += step_, codes += step_ / 4 * kStride) {
      Tiles::template load<4>(x + i, linear_.group);
      Tiles::template load<6>(codes, kStride);
      Tiles::template dot_bytes<0, 4, 6>();
    }
  }

  // Codes less their zero, as signed bytes.
  void unpack(const char* weights, char* to) const {
    const auto zero = Isa::set_bytes(static_cast<char>(linear_.zero));
    for (int64_t g = 0; g < groups_; ++g, weights += weights_.group) {
      const char* from = weights + weights_.header;
      constexpr int kQuads = quads_together(BITS);
      for (int64_t quad = 0; quad < linear_.group / 4; ++quad, to += kStride) {
        typename Isa::Ints codes[2];
        Isa::template codes<BITS>(from, quad % kQuads, codes);
        if (quad % kQuads == kQuads - 1) from += kQuads * kStride * BITS / 8;
        Isa::store_bits(to, Isa::sub_bytes(codes[0], zero));
        Isa::store_bits(to + kLine, Isa::sub_bytes(codes[1], zero));
      }
    }
  }

  template <class T>
  void round_rows(const T* x) const {
    void* const spare = spare_inputs(linear_);
#pragma omp for schedule(static)
    for (int64_t task = 0; task < ceil_div(*call_.rows, kTileRows) * groups_; ++task) {
      const int64_t block = task / groups_, group = task % groups_, row = block * kTileRows;
      char* const to = const_cast<char*>(inputs(block)) + group * layout_.group_bytes;
      for (int64_t r = 0; r < least(kTileRows, *call_.rows - row); ++r)
        round_inputs(x + (row + r) * linear_.inputs, group, r, to, spare);
    }
  }

  template <class T>
  void round_inputs(const T* x, int64_t group, int64_t row, char* to, void* spare) const {
    const int64_t first = group * linear_.group;
    const int64_t count = least(linear_.group, linear_.inputs - first);
    char* const quads = to + TileLayout::kScalesBytes + row * linear_.group;
    const auto write = [&](int64_t i, const int8_t* rounded, int64_t count) {
      std::memcpy(quads + i, rounded, count);
    };
    const Rounded found = round_group(inputs_of(linear_, x, first, count, spare), count,
                                      linear_.group, write);
    float* const scales = reinterpret_cast<float*>(to);
    scales[row] = found.scale;
    scales[kTileRows + row] = found.scale * static_cast<float>(found.sum);
  }

  const OctavoLinearCall& call_;
  const OctavoLinear& linear_;
  const TileLayout layout_;
  const int64_t groups_;
  const CodeLayout weights_;
  const int64_t step_;  // inputs that a tile multiplies at once
};

// Up to about so many rows VPDPBUSD is as fast: it needs no unpacking, and no tile is half empty.
constexpr int64_t kLeastTileRows = 24;

template <class Isa, class Tiles>
void multiply_quantized_tiles(const void* arguments) {
  const auto& call = *static_cast<const OctavoLinearCall*>(arguments);
  const OctavoLinear& linear = *call.linear;
  if (*call.rows < kLeastTileRows || !TileLayout::fits(linear))
    return octavo_linear_quantized_avx512vnni(arguments);
  const typename Tiles::Session session{TileShapes(4, 6, least(linear.group, kLine))};
  switch (linear.bits) {
    case 2: return multiply<QuantizedTiles<Isa, Tiles, 2>>(arguments);
    case 3: return multiply<QuantizedTiles<Isa, Tiles, 3>>(arguments);
    case 4: return multiply<QuantizedTiles<Isa, Tiles, 4>>(arguments);
    default: return multiply<QuantizedTiles<Isa, Tiles, 8>>(arguments);
  }
}

}  // namespace
}  // namespace octavo
