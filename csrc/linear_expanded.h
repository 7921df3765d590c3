// Linears on weights that are expanded, a panel at a time, to dense ones in a thread's own memory,
// and multiplied as such. Their bits are those of the dense linear of the expanded weights.
#pragma once

#include "expanded_layout.h"
#include "linear_dense.h"
#include "spare_memory.h"

namespace octavo {
namespace {  // see numbers.h

// All blocks of a panel.
inline char* expand_panel(const OctavoLinear& linear, const ExpandedLayout& layout,
                          ExpandBlock* expand, int64_t panel) {
  const int64_t blocks = ceil_div(linear.inputs, kBlock);
  const int64_t size = kBlockCodes * element_size(linear);
  char* const to = static_cast<char*>(spare_memory(blocks * size));
  const char* const from = static_cast<const char*>(linear.weights) + panel * layout.end;
  for (int64_t i = 0; i < blocks; ++i) expand(linear, layout, from, i, to + i * size);
  return to;
}

// As few rows as one tile has are multiplied by each block as soon as it is there, more by a whole
// panel.
//
// EXPANDER: gives what expands a linear's weights.
template <class Isa, int SUMS, ExpandBlock* (*EXPANDER)(const OctavoLinear&)>
class Expanded : public Dense<Isa, SUMS> {
 public:
  using Of = Dense<Isa, SUMS>;
  using Element = typename Isa::Element;

  explicit Expanded(const OctavoLinearCall& call)
      : Of(call),
        layout_(expanded_layout(*call.linear)),
        expand_(EXPANDER(*call.linear)),
        range_(call.linear->scales_sums ? call.linear->group : this->inputs_) {}

  void multiply_rows(int64_t begin, int64_t end, int64_t panel_index) const {
    Expanded on(*this);
    if (end - begin > Of::kMaxRows)
      on.whole_ = reinterpret_cast<const Element*>(
          expand_panel(*this->call_.linear, layout_, expand_, panel_index));
    multiply_tiles(on, begin, end, panel_index);
  }

  template <int ROWS>
  void multiply(int64_t row, int64_t panel_index, Ahead) const {
    const char* const from =
        static_cast<const char*>(this->call_.linear->weights) + panel_index * layout_.end;
    const Element* const x = this->x_ + row * this->stride_;
    Sums<ROWS> sums;
    zero(sums);
    for (int64_t first = 0; first < this->inputs_; first += range_) {
      const int64_t count = least(range_, this->inputs_ - first);
      if (!this->call_.linear->scales_sums) {
        add_inputs_of(sums, x + first, from, first, count);
        continue;
      }
      Sums<ROWS> part;
      zero(part);
      add_inputs_of(part, x + first, from, first, count);
      add_scaled(sums, part, from + layout_.scales + first / range_ * kPanel * layout_.scale);
    }
    for (int r = 0; r < ROWS; ++r) {
      Vec lanes[kVectors];
      for (int v = 0; v < kVectors; ++v)
        lanes[v] = sums[v / kAtOnce<ROWS>][r][v % kAtOnce<ROWS>];
      finish<Isa>(this->call_, lanes, row + r, panel_index);
    }
  }

 private:
  using Vec = typename Isa::Vec;
  static constexpr int kVectors = kVecs<Isa>;
  template <int ROWS>
  static constexpr int kAtOnce = Of::template kAtOnce<ROWS>;
  template <int ROWS>
  using Sums = Vec[kVectors / kAtOnce<ROWS>][ROWS][kAtOnce<ROWS>];

  template <int PARTS, int ROWS, int VECTORS>
  static OCTAVO_INLINE void zero(Vec (&sums)[PARTS][ROWS][VECTORS]) {
    for (auto& part : sums)
      for (auto& some : part)
        for (auto& sum : some) sum = Isa::set(0.0f);
  }

  // Adds `count` inputs from `first` on, the first of a block.
  template <int PARTS, int ROWS, int VECTORS>
  OCTAVO_INLINE void add_inputs_of(Vec (&sums)[PARTS][ROWS][VECTORS], const Element* x,
                                   const char* from, int64_t first, int64_t count) const {
    if (whole_) return add_part(sums, x, whole_ + first * kPanel, count);
    for (int64_t i = 0; i < count; i += kBlock) {
      alignas(kLine) Element block[kBlockCodes];
      expand_(*this->call_.linear, layout_, from, (first + i) / kBlock, block);
      add_part(sums, x + i, block, least(kBlock, count - i));
    }
  }
  template <int PARTS, int ROWS, int VECTORS>
  OCTAVO_INLINE void add_part(Vec (&sums)[PARTS][ROWS][VECTORS], const Element* x,
                              const Element* weights, int64_t count) const {
#pragma GCC unroll 2
    for (int part = 0; part < PARTS; ++part)
      this->template add_range<ROWS>(sums[part], x,
                                     weights + part * VECTORS * Isa::kWidth * Isa::kStep, count);
  }

  // sums += part * scales, FP32 or FP16 [32].
  template <int PARTS, int ROWS, int VECTORS>
  OCTAVO_INLINE void add_scaled(Vec (&sums)[PARTS][ROWS][VECTORS],
                                const Vec (&part)[PARTS][ROWS][VECTORS], const char* from) const {
    for (int v = 0; v < kVectors; ++v) {
      const int64_t at = v * Isa::kWidth;
      const Vec scale = this->call_.linear->wide_scales
                            ? Isa::load(reinterpret_cast<const float*>(from) + at)
                            : Isa::load_halves(reinterpret_cast<const uint16_t*>(from) + at);
      for (int r = 0; r < ROWS; ++r) {
        Vec& sum = sums[v / VECTORS][r][v % VECTORS];
        sum = Isa::fma(part[v / VECTORS][r][v % VECTORS], scale, sum);
      }
    }
  }

  const ExpandedLayout layout_;
  ExpandBlock* const expand_;
  const int64_t range_;              // inputs that are summed up before they are scaled
  const Element* whole_ = nullptr;  // a panel that has been expanded
};

}  // namespace
}  // namespace octavo
