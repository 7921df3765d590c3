// Linears on quantized weights: products of 8 bits, summed up exactly within a group.
//
// `Isa` brings, beside its vectors, `Ints` of as many int32 as a Vec has numbers, and
//   codes<BITS>(from, quad, to)   32 lanes' codes of four inputs each, less kOffset<BITS>; with 2
//                                 and 3 bits from the four quads that lie together
//   dot<BITS>(sums, codes, quad)  sums + the products of codes and four inputs
//   load_halves(from)             FP16 numbers as FP32
//   set_ints(x), quad(from), floats(ints)
#pragma once

#include "linear.h"
#include "linear_scratch.h"
#include "rounding.h"
#include "spare_memory.h"

namespace octavo {
namespace {  // see numbers.h

// Of some lanes of a group, the `v`-th vector: scales or minimums, from where those begin.
template <class Isa>
OCTAVO_INLINE typename Isa::Vec scales_of(const OctavoLinear& linear, const char* from, int v) {
  if (linear.wide_scales) return Isa::load(reinterpret_cast<const float*>(from) + v * Isa::kWidth);
  return Isa::load_halves(reinterpret_cast<const uint16_t*>(from) + v * Isa::kWidth);
}
// The minimums, or what zeros make of them: -scale * zero.
template <class Isa>
OCTAVO_INLINE typename Isa::Vec minimums(const OctavoLinear& linear, const CodeLayout& layout,
                                         const char* header, int v) {
  const char* const from = header + layout.scales;
  if (!linear.has_zeros) return scales_of<Isa>(linear, from, v);
  const auto zeros = Isa::load(reinterpret_cast<const int8_t*>(from) + v * Isa::kWidth);
  const auto negative = Isa::sub(Isa::set(0.0f), zeros);
  return Isa::mul(scales_of<Isa>(linear, header, v), negative);
}

// A group of a row's inputs, `count` of them, in the order of the weights. `spare`: memory for
// them.
template <class T>
inline const T* inputs_of(const OctavoLinear& linear, const T* row, int64_t first, int64_t count,
                          void* spare) {
  if (!linear.order) return row + first;
  T* const to = static_cast<T*>(spare);
  for (int64_t i = 0; i < count; ++i) to[i] = row[linear.order[first + i]];
  return to;
}
// That memory, of this thread.
inline void* spare_inputs(const OctavoLinear& linear) {
  return linear.order ? spare_memory(linear.group * element_size(linear)) : nullptr;
}

template <class Isa, int BITS, int MAX_ROWS>
class Quantized {
 public:
  static constexpr int kMaxRows = MAX_ROWS;
  static constexpr int kQuads = quads_together(BITS);
  static constexpr int64_t kStepBytes = kQuads * kPanel * 4 * BITS / 8;
  static constexpr int64_t kAhead = 4096;
  static_assert(RoundedLayout::kMaxWidth % kMaxRows == 0, "tiles of a full block are full");

  explicit Quantized(const OctavoLinearCall& call)
      : call_(call),
        linear_(*call.linear),
        layout_(linear_, *call.rows),
        groups_(num_groups(linear_)),
        weights_(linear_),
        rounded_(static_cast<char*>(call.scratch)) {}

  void prepare() const {
    if (linear_.element == OCTAVO_BF16) {
      round_rows(static_cast<const bf16*>(call_.x));
    } else {
      round_rows(static_cast<const float*>(call_.x));
    }
  }

  int64_t block() const { return largest(1, layout_.width); }
  int64_t chunk() const { return 16 * block(); }
  int64_t panel_bytes() const { return groups_ * weights_.group; }
  const char* panel(int64_t i) const {
    return static_cast<const char*>(linear_.weights) + i * panel_bytes();
  }

  void multiply_rows(int64_t begin, int64_t end, int64_t panel_index) const {
    multiply_tiles(*this, begin, end, panel_index);
  }

  template <int ROWS>
  void multiply(int64_t row, int64_t panel_index, Ahead ahead) const {
    const char* weights = panel(panel_index);
    Sums<ROWS> sums;
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; ++r)
      for (int v = 0; v < kVecs<Isa>; ++v) sums[r][v] = Isa::set(0.0f);

    for (int64_t g = 0; g < groups_; ++g) {
      const char* const header = weights;
      weights += weights_.header;
      ahead.fetch_header(weights_.header);
      const Inputs x = inputs(row, g);
      Dots<ROWS> dots;
#pragma GCC unroll 16
      for (int r = 0; r < ROWS; ++r)
        for (int v = 0; v < kVecs<Isa>; ++v) dots[r][v] = Isa::set_ints(x.starts[r]);
      add_quads<ROWS>(dots, x.quads, weights, linear_.group / 4, ahead);
      weights += linear_.group / 4 / kQuads * kStepBytes;
      add_group<ROWS>(sums, dots, x, header);
    }
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; ++r) finish<Isa>(call_, sums[r], row + r, panel_index);
  }

 private:
  using Vec = typename Isa::Vec;
  using Ints = typename Isa::Ints;
  template <int ROWS>
  using Sums = Vec[ROWS][kVecs<Isa>];
  template <int ROWS>
  using Dots = Ints[ROWS][kVecs<Isa>];

  // A group of a block's inputs, from some row on.
  struct Inputs {
    const float* scales;
    const float* sums;
    const int32_t* starts;
    const int8_t* quads;
  };
  Inputs inputs(int64_t row, int64_t group) const {
    const int64_t distance = layout_.width * sizeof(float);
    const char* const at = rounded_ + row / layout_.width * layout_.block_bytes +
                           group * layout_.group_bytes + row % layout_.width * sizeof(float);
    return {reinterpret_cast<const float*>(at), reinterpret_cast<const float*>(at + distance),
            reinterpret_cast<const int32_t*>(at + 2 * distance),
            reinterpret_cast<const int8_t*>(at + 3 * distance)};
  }

  template <int ROWS>
  OCTAVO_INLINE void add_quads(Dots<ROWS>& dots, const int8_t* x, const char* weights,
                               int64_t quads, Ahead& ahead) const {
    const int64_t width = 4 * layout_.width;
#pragma GCC unroll 1
    for (int64_t q = 0; q < quads; q += kQuads, weights += kStepBytes) {
      ahead.fetch<1, kStepBytes / kLine>();
#pragma GCC unroll 4
      for (int step = 0; step < kQuads; ++step, x += width) {
        Ints codes[kVecs<Isa>];
        Isa::template codes<BITS>(weights, step, codes);
#pragma GCC unroll 16
        for (int r = 0; r < ROWS; ++r) {
          const Ints quad = Isa::quad(x + 4 * r);
#pragma GCC unroll 4
          for (int v = 0; v < kVecs<Isa>; ++v)
            dots[r][v] = Isa::template dot<BITS>(dots[r][v], codes[v], quad);
        }
      }
    }
  }

  // A group's exact sums, times the scales of weights and inputs, and what the minimums add.
  template <int ROWS>
  OCTAVO_INLINE void add_group(Sums<ROWS>& sums, const Dots<ROWS>& dots, const Inputs& x,
                               const char* header) const {
#pragma GCC unroll 4
    for (int v = 0; v < kVecs<Isa>; ++v) {
      const Vec scale = scales_of<Isa>(linear_, header, v);
#pragma GCC unroll 16
      for (int r = 0; r < ROWS; ++r) {
        const Vec both = Isa::mul(scale, Isa::set(x.scales[r]));
        sums[r][v] = Isa::fma(both, Isa::floats(dots[r][v]), sums[r][v]);
      }
    }
    if (!linear_.has_minimums && !linear_.has_zeros) return;
#pragma GCC unroll 4
    for (int v = 0; v < kVecs<Isa>; ++v) {
      const Vec minimum = minimums<Isa>(linear_, weights_, header, v);
#pragma GCC unroll 16
      for (int r = 0; r < ROWS; ++r)
        sums[r][v] = Isa::fma(minimum, Isa::set(x.sums[r]), sums[r][v]);
    }
  }

  // A task is a group of a block: what it writes lies together.
  template <class T>
  void round_rows(const T* x) const {
    void* const spare = spare_inputs(linear_);
#pragma omp for schedule(static)
    for (int64_t task = 0; task < layout_.blocks * groups_; ++task) {
      const int64_t first = task / groups_ * layout_.width;
      const int64_t end = least(first + layout_.width, *call_.rows);
      for (int64_t row = first; row < end; ++row)
        round_inputs(x + row * linear_.inputs, row, task % groups_, spare);
    }
  }

  template <class T>
  void round_inputs(const T* x, int64_t row, int64_t group, void* spare) const {
    const int64_t first = group * linear_.group;
    const int64_t count = least(linear_.group, linear_.inputs - first);
    const auto offset = static_cast<int32_t>(linear_.zero - Isa::template kOffset<BITS>);
    const Inputs to = inputs(row, group);
    auto* quads = const_cast<int8_t*>(to.quads);
    const auto write = [&](int64_t, const int8_t* rounded, int64_t count) {
      for (int64_t q = 0; q < count; q += 4, quads += 4 * layout_.width)
        std::memcpy(quads, rounded + q, 4);
    };
    const Rounded found = round_group(inputs_of(linear_, x, first, count, spare), count,
                                      linear_.group, write);
    *const_cast<float*>(to.scales) = found.scale;
    *const_cast<float*>(to.sums) = found.scale * static_cast<float>(found.sum);
    *const_cast<int32_t*>(to.starts) = -offset * found.sum;
  }

  const OctavoLinearCall& call_;
  const OctavoLinear& linear_;
  const RoundedLayout layout_;
  const int64_t groups_;
  const CodeLayout weights_;
  char* const rounded_;
};

template <class Isa, int MAX_ROWS>
void multiply_quantized(const void* arguments) {
  const auto& call = *static_cast<const OctavoLinearCall*>(arguments);
  switch (call.linear->bits) {
    case 2: return multiply<Quantized<Isa, 2, MAX_ROWS>>(arguments);
    case 3: return multiply<Quantized<Isa, 3, MAX_ROWS>>(arguments);
    case 4: return multiply<Quantized<Isa, 4, MAX_ROWS>>(arguments);
    default: return multiply<Quantized<Isa, 8, MAX_ROWS>>(arguments);
  }
}

}  // namespace
}  // namespace octavo
