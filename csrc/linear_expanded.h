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

// As few rows as one tile has are multiplied by each block as soon as it is there.
//
// EXPANDER: gives what expands a linear's weights.
template <class Isa, int SUMS, ExpandBlock* (*EXPANDER)(const OctavoLinear&)>
class Expanded : public Dense<Isa, SUMS> {
 public:
  using Of = Dense<Isa, SUMS>;
  using Element = typename Isa::Element;

  explicit Expanded(const OctavoLinearCall& call)
      : Of(call), layout_(expanded_layout(*call.linear)), expand_(EXPANDER(*call.linear)) {}

  void multiply_rows(int64_t begin, int64_t end, int64_t panel_index) const {
    const OctavoLinear& linear = *this->call_.linear;
    if (end - begin <= Of::kMaxRows)
      return multiply_tile(*this, end - begin, begin, panel_index, Ahead{});
    const char* const whole = expand_panel(linear, layout_, expand_, panel_index);
    this->with_panel(whole).multiply_rows(begin, end, panel_index);
  }

  template <int ROWS>
  void multiply(int64_t row, int64_t panel_index, Ahead) const {
    constexpr int kVectors = kVecs<Isa>, kAtOnce = Of::template kAtOnce<ROWS>;
    const OctavoLinear& linear = *this->call_.linear;
    const char* const from = static_cast<const char*>(linear.weights) + panel_index * layout_.end;
    typename Isa::Vec sums[kVectors / kAtOnce][ROWS][kAtOnce];
    for (auto& part : sums)
      for (auto& some : part)
        for (auto& sum : some) sum = Isa::set(0.0f);
    for (int64_t first = 0; first < this->inputs_; first += kBlock) {
      alignas(kLine) Element block[kBlockCodes];
      expand_(linear, layout_, from, first / kBlock, block);
      const Element* const x = this->x_ + row * this->stride_ + first;
      const int64_t count = least(kBlock, this->inputs_ - first);
#pragma GCC unroll 2
      for (int part = 0; part < kVectors / kAtOnce; ++part)
        this->template add_range<ROWS>(sums[part], x,
                                       block + part * kAtOnce * Isa::kWidth * Isa::kStep, count);
    }
    for (int r = 0; r < ROWS; ++r) {
      typename Isa::Vec lanes[kVectors];
      for (int v = 0; v < kVectors; ++v) lanes[v] = sums[v / kAtOnce][r][v % kAtOnce];
      finish<Isa>(this->call_, lanes, row + r, panel_index);
    }
  }

 private:
  const ExpandedLayout layout_;
  ExpandBlock* const expand_;
};

}  // namespace
}  // namespace octavo
