// Linears on dense weights.
//
// `Isa` brings an Element, products of kStep of them (see elements.h), and one_input(from): the
// last one of an odd number of inputs, and a zero, for all lanes.
#pragma once

#include "linear.h"
#include "linear_scratch.h"

namespace octavo {
namespace {  // see numbers.h

// Rows by a panel: SUMS vectors of sums are kept in registers over all inputs. Where that is too few
// for a tile's rows, half of the panel is taken at a time.
template <class Isa, int SUMS>
class Dense {
 public:
  using Element = typename Isa::Element;
  static constexpr int kMaxRows = SUMS / 2;
  static constexpr int64_t kStepBytes = kPanel * Isa::kStep * sizeof(Element);
  static constexpr int64_t kAhead = 4096;

  explicit Dense(const OctavoLinearCall& call)
      : call_(call),
        inputs_(call.linear->inputs),
        stride_(inputs_),
        weights_(static_cast<const char*>(call.linear->weights)),
        panel_bytes_(dense_panel_bytes(*call.linear)) {
    x_ = static_cast<const Element*>(call.x);
    // Where a tile's rows would meet in so few sets of the L1 cache that they do not fit there,
    // they are copied to places further apart; also where they come in another order.
    copied_ = call.linear->order || (*call.rows >= kMaxRows / 2 && rows_conflict(*call.linear));
    if (!copied_) return;
    x_ = static_cast<const Element*>(call.scratch);
    stride_ += kApart / sizeof(Element);
  }

  void prepare() const {
    if (!copied_) return;
    const Element* const from = static_cast<const Element*>(call_.x);
    Element* const to = static_cast<Element*>(call_.scratch);
#pragma omp for schedule(static)
    for (int64_t row = 0; row < *call_.rows; ++row)
      copy_inputs(*call_.linear, from + row * inputs_, to + row * stride_);
  }

  int64_t chunk() const { return 28 * 14 / sizeof(Element); }
  int64_t block() const { return chunk(); }
  int64_t panel_bytes() const { return panel_bytes_; }
  const char* panel(int64_t i) const { return weights_ + i * panel_bytes_; }

  void multiply_rows(int64_t begin, int64_t end, int64_t panel_index) const {
    multiply_tiles(*this, begin, end, panel_index);
  }

  template <int ROWS>
  void multiply(int64_t row, int64_t panel_index, Ahead ahead) const {
    const Element* x = x_ + row * stride_;
    const Element* weights = reinterpret_cast<const Element*>(panel(panel_index));
    typename Isa::Vec sums[ROWS][kVecs<Isa>];
#pragma GCC unroll 2
    for (int first = 0; first < kVecs<Isa>; first += kAtOnce<ROWS>) {
      Sums<ROWS> part;
      sum_up<ROWS>(part, x, weights + first * Isa::kWidth * Isa::kStep, ahead);
#pragma GCC unroll 16
      for (int r = 0; r < ROWS; ++r)
        for (int v = 0; v < kAtOnce<ROWS>; ++v) sums[r][first + v] = part[r][v];
    }
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; ++r) finish<Isa>(call_, sums[r], row + r, panel_index);
  }

 protected:
  template <int ROWS>
  static constexpr int kAtOnce = ROWS * kVecs<Isa> <= SUMS ? kVecs<Isa> : 2;
  template <int ROWS>
  using Sums = typename Isa::Vec[ROWS][kAtOnce<ROWS>];

  template <int ROWS>
  OCTAVO_INLINE void sum_up(Sums<ROWS>& sums, const Element* x, const Element* weights,
                            Ahead& ahead) const {
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; ++r)
      for (int v = 0; v < kAtOnce<ROWS>; ++v) sums[r][v] = Isa::set(0.0f);
#pragma GCC unroll 4
    for (int64_t i = 0; i < inputs_ / Isa::kStep; ++i) {
      ahead.fetch<kLevel<ROWS>, kStepBytes * kAtOnce<ROWS> / kVecs<Isa> / kLine>();
      add_inputs<false, ROWS>(sums, x + Isa::kStep * i, weights);
      weights += Isa::kStep * kPanel;
    }
    if (inputs_ % Isa::kStep) add_inputs<true, ROWS>(sums, x + inputs_ - 1, weights);
  }

  // Adds some inputs, from an even one on, of some of a panel's vectors.
  template <int ROWS>
  OCTAVO_INLINE void add_range(Sums<ROWS>& sums, const Element* x, const Element* weights,
                               int64_t count) const {
#pragma GCC unroll 4
    for (int64_t i = 0; i < count / Isa::kStep; ++i) {
      add_inputs<false, ROWS>(sums, x + Isa::kStep * i, weights);
      weights += Isa::kStep * kPanel;
    }
    if (count % Isa::kStep) add_inputs<true, ROWS>(sums, x + count - 1, weights);
  }

  // More rows take long enough for L2, and with several tiles the next panel is too large for L1.
  template <int ROWS>
  static constexpr int kLevel = ROWS < kMaxRows / 2 ? 1 : 2;

  template <bool LAST_OF_ODD, int ROWS>
  OCTAVO_INLINE void add_inputs(Sums<ROWS>& sums, const Element* x,
                                const Element* weights) const {
    typename Isa::Operand lanes[kAtOnce<ROWS>];
    for (int v = 0; v < kAtOnce<ROWS>; ++v)
      lanes[v] = Isa::operand(weights + v * Isa::kWidth * Isa::kStep);
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; ++r) {
      const Element* from = x + r * stride_;
      const auto inputs = LAST_OF_ODD ? Isa::one_input(from) : Isa::broadcast(from);
#pragma GCC unroll 4
      for (int v = 0; v < kAtOnce<ROWS>; ++v)
        sums[r][v] = Isa::dot(sums[r][v], lanes[v], inputs);
    }
  }

  const OctavoLinearCall& call_;
  const Element* x_;
  int64_t inputs_, stride_;
  const char* weights_;
  int64_t panel_bytes_;
  bool copied_;
};

}  // namespace
}  // namespace octavo
