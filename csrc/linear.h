// Linears on packed weights (OctavoLinear): what weights of every kind share. linear_dense.h and
// linear_quantized.h multiply.
//
// `Isa`: vectors, see vectors_avx512.h.
#pragma once

#include <cstring>

#include "numbers.h"
#include "octavo.h"
#include "vector_math.h"

#define OCTAVO_INLINE inline __attribute__((always_inline))

namespace octavo {
namespace {  // see numbers.h

constexpr int kPanel = 32;  // lanes
constexpr int kHalf = kPanel / 2;
constexpr int64_t kLine = 64;
constexpr int64_t kStep16 = 32;  // inputs of BF16 that a tile multiplies at once

template <class Isa>
constexpr int kVecs = kPanel / Isa::kWidth;  // of a panel

inline int64_t num_panels(const OctavoLinear& linear) {
  return ceil_div(linear.outputs, linear.epilogue == OCTAVO_SILU_MUL ? kHalf : kPanel);
}
inline int64_t element_size(const OctavoLinear& linear) {
  return linear.element == OCTAVO_BF16 ? sizeof(bf16) : sizeof(float);
}
inline int64_t num_groups(const OctavoLinear& linear) {
  return ceil_div(linear.inputs, linear.group);
}
// Of a panel of dense weights.
inline int64_t dense_panel_bytes(const OctavoLinear& linear) {
  const int64_t step = linear.element == OCTAVO_BF16 ? kStep16 : 1;
  return ceil_div(linear.inputs, step) * step * kPanel * element_size(linear);
}
// Bytes of a group of a panel of quantized weights: of its scales, of them and the minimums or
// zeros, of all.
struct CodeLayout {
  int64_t scales, header, group;
  explicit CodeLayout(const OctavoLinear& linear)
      : scales(kPanel * (linear.wide_scales ? sizeof(float) : sizeof(uint16_t))),
        header((linear.has_minimums ? 2 : 1) * scales + (linear.has_zeros ? kPanel : 0)),
        group(header + linear.group * kPanel * linear.bits / 8) {}
};

// How many quads of inputs have their codes together.
constexpr int quads_together(int64_t bits) { return bits < 4 ? 4 : 1; }

// The first `count` numbers of a vector, all of them where it has no more.
template <class Isa, class T>
OCTAVO_INLINE typename Isa::Vec load_firsts(const T* from, int64_t count) {
  if (count >= Isa::kWidth) return Isa::load(from);
  T numbers[Isa::kWidth] = {};
  std::memcpy(numbers, from, count * sizeof(T));
  return Isa::load(numbers);
}
template <class Isa, class T>
OCTAVO_INLINE void store_firsts(T* to, typename Isa::Vec vector, int64_t count) {
  if (count >= Isa::kWidth) return Isa::store(to, vector);
  T numbers[Isa::kWidth];
  Isa::store(numbers, vector);
  std::memcpy(to, numbers, count * sizeof(T));
}

template <class Isa>
OCTAVO_INLINE typename Isa::Vec silu(typename Isa::Vec a) {
  const auto power = exp2<Isa>(Isa::mul(a, Isa::set(-kLog2e)));
  return Isa::div(a, Isa::add(Isa::set(1.0f), power));
}

// COUNT vectors of a row's outputs, from `output` on.
template <class Isa, class T, int COUNT>
OCTAVO_INLINE void store_outputs(const OctavoLinearCall& call, const typename Isa::Vec* sums,
                                 int64_t row, int64_t output) {
  const OctavoLinear& linear = *call.linear;
  for (int v = 0; v < COUNT; ++v, output += Isa::kWidth) {
    const int64_t left = linear.outputs - output, at = row * linear.stride + output;
    if (left <= 0) return;
    auto sum = sums[v];
    if (linear.epilogue == OCTAVO_ADD)
      sum = Isa::add(sum, load_firsts<Isa>(static_cast<const T*>(call.other) + at, left));
    store_firsts<Isa>(static_cast<T*>(call.y) + at, sum, left);
  }
}

template <class Isa, class T>
OCTAVO_INLINE void finish_as(const OctavoLinearCall& call, typename Isa::Vec* sums, int64_t row,
                             int64_t panel) {
  if (call.linear->epilogue == OCTAVO_SILU_MUL) {
    constexpr int half = kVecs<Isa> / 2;
    for (int v = 0; v < half; ++v) sums[v] = Isa::mul(silu<Isa>(sums[v]), sums[half + v]);
    store_outputs<Isa, T, half>(call, sums, row, panel * kHalf);
  } else {
    store_outputs<Isa, T, kVecs<Isa>>(call, sums, row, panel * kPanel);
  }
}

// The largest of a panel's outputs, and which it is.
template <class Isa>
OCTAVO_INLINE void store_largest(const OctavoLinearCall& call, const typename Isa::Vec* sums,
                                 int64_t row, int64_t panel) {
  float outputs[kPanel];
  for (int v = 0; v < kVecs<Isa>; ++v) Isa::store(outputs + v * Isa::kWidth, sums[v]);
  const int64_t first = panel * kPanel, count = least(kPanel, call.linear->outputs - first);
  for (int64_t i = count; i < kPanel; ++i) outputs[i] = outputs[0];
  auto top = Isa::load(outputs);
  for (int v = 1; v < kVecs<Isa>; ++v)
    top = Isa::max(top, Isa::load(outputs + v * Isa::kWidth));
  const float largest = Isa::highest(top);
  int at = 0;
  while (outputs[at] < largest) ++at;  // 0 where there are no numbers
  const int64_t place = row * num_panels(*call.linear) + panel;
  static_cast<float*>(call.y)[place] = largest;
  call.ids[place] = static_cast<int32_t>(first + at);
}

// Adds the products of a panel's outliers and a row's inputs.
template <class Isa>
void add_outliers(const OctavoLinearCall& call, typename Isa::Vec* sums, int64_t row,
                  int64_t panel) {
  const OctavoLinear& linear = *call.linear;
  const OctavoOutliers& from = *linear.outliers;
  const int64_t at = row * linear.inputs;
  float lanes[kPanel];
  for (int v = 0; v < kVecs<Isa>; ++v) Isa::store(lanes + v * Isa::kWidth, sums[v]);
  for (int64_t i = from.starts[panel]; i < from.starts[panel + 1]; ++i) {
    const float x = linear.element == OCTAVO_BF16
                        ? to_float(static_cast<const bf16*>(call.x)[at + from.columns[i]])
                        : static_cast<const float*>(call.x)[at + from.columns[i]];
    lanes[from.lanes[i]] += x * from.values[i];
  }
  for (int v = 0; v < kVecs<Isa>; ++v) sums[v] = Isa::load(lanes + v * Isa::kWidth);
}

// A row's sums of a panel become outputs.
template <class Isa>
OCTAVO_INLINE void finish(const OctavoLinearCall& call, typename Isa::Vec* sums, int64_t row,
                          int64_t panel) {
  const OctavoLinear& linear = *call.linear;
  if (linear.lane_scales) {
    const float* scales = linear.lane_scales + panel * kPanel;
    for (int v = 0; v < kVecs<Isa>; ++v)
      sums[v] = Isa::mul(sums[v], Isa::load(scales + v * Isa::kWidth));
  }
  if (linear.outliers) add_outliers<Isa>(call, sums, row, panel);
  if (linear.bias) {
    const float* bias = linear.bias + panel * kPanel;
    for (int v = 0; v < kVecs<Isa>; ++v)
      sums[v] = Isa::add(sums[v], Isa::load(bias + v * Isa::kWidth));
  }
  if (linear.epilogue == OCTAVO_LARGEST) {
    store_largest<Isa>(call, sums, row, panel);
  } else if (linear.element == OCTAVO_F32 || linear.epilogue == OCTAVO_LOGITS) {
    finish_as<Isa, float>(call, sums, row, panel);
  } else {
    finish_as<Isa, bf16>(call, sums, row, panel);
  }
}

// The weights to fetch while a tile is multiplied. LEVEL: of the nearest cache they go to.
struct Ahead {
  const char* next;
  int64_t step;

  template <int LEVEL, int LINES>
  OCTAVO_INLINE void fetch() {
    for (int line = 0; line < LINES; ++line)
      __builtin_prefetch(next + line * kLine, 0, 4 - LEVEL);
    next += step;
  }

  // What lies before weights.
  OCTAVO_INLINE void fetch_header(int64_t bytes) {
    for (int64_t at = 0; at < bytes; at += kLine) __builtin_prefetch(next + at, 0, 3);
    next += bytes;
  }
};

// A tile of a number of rows known at run time, 1 .. ROWS.
template <class Weights, int ROWS = Weights::kMaxRows>
OCTAVO_INLINE void multiply_tile(const Weights& weights, int64_t rows, int64_t row, int64_t panel,
                                 Ahead ahead) {
  if (rows == ROWS) return weights.template multiply<ROWS>(row, panel, ahead);
  if constexpr (ROWS > 1) multiply_tile<Weights, ROWS - 1>(weights, rows, row, panel, ahead);
}

// Rows begin .. end of a panel, in tiles of nearly equal size within each block. Where they are
// several, each of them fetches its share of the next panel: the first alone would wait for the
// memory, the others not.
//
// `Weights` says kMaxRows (of a tile), kStepBytes (weights between two fetches), kAhead (bytes
// between those multiplied and those fetched), block() (rows, whose beginnings no tile crosses),
// panel_bytes(), panel(i), and has multiply<ROWS>(row, panel, ahead).
template <class Weights>
void multiply_tiles(const Weights& weights, int64_t begin, int64_t end, int64_t panel) {
  const int64_t rows = end - begin, size = weights.panel_bytes(), step = Weights::kStepBytes;
  const char* const at = weights.panel(panel);
  for (int64_t block = begin; block < end; block += weights.block()) {
    const int64_t count = least(weights.block(), end - block);
    const int64_t tiles = ceil_div(count, Weights::kMaxRows);
    for (int64_t tile = 0; tile < tiles; ++tile) {
      const int64_t row = block + count * tile / tiles, next = block + count * (tile + 1) / tiles;
      Ahead ahead{at + Weights::kAhead, step};
      if (rows > Weights::kMaxRows)
        ahead = {at + size + size * (row - begin) / rows, ceil_div(step * (next - row), rows)};
      multiply_tile(weights, next - row, row, panel, ahead);
    }
  }
}

// A task is a panel of a chunk of rows, whose inputs are to stay in the L2 cache.
//
// `Weights`, made of a call, says chunk() (rows); prepare(), by all threads, makes the inputs what
// multiply_rows(begin, end, panel) takes.
template <class Weights>
void multiply(const void* arguments) {
  const auto& call = *static_cast<const OctavoLinearCall*>(arguments);
  const int64_t rows = *call.rows, panels = num_panels(*call.linear);
  const Weights weights(call);
  weights.prepare();
  const int64_t chunk = weights.chunk(), chunks = ceil_div(rows, chunk);
  if (chunks <= 1) {  // waits for memory: a thread's panels follow one another, as it fetches them
#pragma omp for schedule(static)
    for (int64_t panel = 0; panel < chunks * panels; ++panel)
      weights.multiply_rows(0, rows, panel);
  } else {  // computes: the last chunk is shorter, so who is done first takes the next
#pragma omp for schedule(dynamic, 4)
    for (int64_t task = 0; task < chunks * panels; ++task) {
      const int64_t begin = task / panels * chunk;
      weights.multiply_rows(begin, least(begin + chunk, rows), task % panels);
    }
  }
}

}  // namespace
}  // namespace octavo
