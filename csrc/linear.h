// Linears on packed weights (OctavoLinear), over an instruction set.
//
// `Isa` brings products of BF16 pairs (vectors_avx512bf16.h) and, of its own:
//   one_input(from)           the last one of an odd number of inputs, and a zero, for all lanes
//   silu(vector)
//   load(from, count)         BF16 numbers as FP32, zeros from `count` on
//   store(to, vector, count)  the first `count` numbers, as FP32 or BF16
#pragma once

#include <cstdlib>
#include <cstring>

#include "numbers.h"
#include "octavo.h"

#define OCTAVO_INLINE inline __attribute__((always_inline))

namespace octavo {
namespace {  // see numbers.h

constexpr int64_t kVector = 16;
constexpr int64_t kPanel = 2 * kVector;    // lanes
constexpr int kMaxRows = 14;               // of a tile: 28 sums, which leaves 4 of 32 registers
constexpr int64_t kChunk = 14 * kMaxRows;  // rows whose inputs are to stay in the L2 cache
constexpr int64_t kAhead = 2048;           // weights between those multiplied and those fetched
constexpr int64_t kConflict = 1024;        // inputs: rows a multiple of 2 KiB apart meet in a cache
constexpr int64_t kApart = 32;             // inputs between rows that would
constexpr int64_t kSerial = 1 << 16;       // products not worth waking other threads for

// The arguments of a call. A row of x begins ``stride`` after the one before.
struct Product {
  const OctavoLinear& linear;
  const bf16* x;
  int64_t stride;
  const bf16* other;
  void* y;
  int64_t rows;

  int64_t panels() const {
    return ceil_div(linear.outputs, linear.epilogue == OCTAVO_SILU_MUL ? kVector : kPanel);
  }
  int64_t panel_size() const { return ceil_div(linear.inputs, 2) * 2 * kPanel; }
};

// Up to 16 outputs of a row, after the bias and SiLU.
template <class Isa>
OCTAVO_INLINE void store_outputs(const Product& product, typename Isa::Vec sum, int64_t row,
                                 int64_t output) {
  const OctavoLinear& linear = product.linear;
  const int64_t count = least(linear.outputs - output, kVector);
  if (count <= 0) return;
  const int64_t at = row * linear.outputs + output;
  if (linear.epilogue == OCTAVO_LOGITS) {
    Isa::store(static_cast<float*>(product.y) + at, sum, count);
    return;
  }
  if (linear.epilogue == OCTAVO_ADD) sum = Isa::add(sum, Isa::load(product.other + at, count));
  Isa::store(static_cast<bf16*>(product.y) + at, sum, count);
}

// A row's sums of a panel become outputs.
template <class Isa>
OCTAVO_INLINE void finish(const Product& product, typename Isa::Vec low,
                          typename Isa::Vec high, int64_t row, int64_t panel) {
  const OctavoLinear& linear = product.linear;
  if (linear.bias) {
    low = Isa::add(low, Isa::load(linear.bias + panel * kPanel));
    high = Isa::add(high, Isa::load(linear.bias + panel * kPanel + kVector));
  }
  if (linear.epilogue == OCTAVO_SILU_MUL) {
    store_outputs<Isa>(product, Isa::mul(Isa::silu(low), high), row, panel * kVector);
  } else {
    store_outputs<Isa>(product, low, row, panel * kPanel);
    store_outputs<Isa>(product, high, row, panel * kPanel + kVector);
  }
}

// The weights to fetch while a tile is multiplied. LEVEL: of the nearest cache they go to.
struct Ahead {
  const bf16* next;
  int64_t step;

  template <int LEVEL>
  OCTAVO_INLINE void fetch() {
    __builtin_prefetch(next, 0, 4 - LEVEL);
    __builtin_prefetch(next + kPanel, 0, 4 - LEVEL);
    next += step;
  }
};

// ROWS rows by a panel: their sums are kept in registers over all inputs.
template <class Isa, int ROWS>
class Tile {
 public:
  static void multiply(const Product& product, int64_t row, int64_t panel, Ahead ahead) {
    const int64_t inputs = product.linear.inputs, stride = product.stride;
    const bf16* x = product.x + row * stride;
    const bf16* weights = product.linear.weights + panel * product.panel_size();
    Sums sums;
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; ++r) sums[r][0] = sums[r][1] = Isa::set(0.0f);

#pragma GCC unroll 4
    for (int64_t i = 0; i < inputs / 2; ++i) {
      ahead.fetch<kLevel>();
      add_inputs<false>(sums, x + 2 * i, stride, weights);
      weights += 2 * kPanel;
    }
    if (inputs % 2) add_inputs<true>(sums, x + inputs - 1, stride, weights);

#pragma GCC unroll 16
    for (int r = 0; r < ROWS; ++r) finish<Isa>(product, sums[r][0], sums[r][1], row + r, panel);
  }

 private:
  using Sums = typename Isa::Vec[ROWS][2];

  // More rows take long enough for L2, and with several tiles the next panel is too large for L1.
  static constexpr int kLevel = ROWS < kMaxRows / 2 ? 1 : 2;

  template <bool LAST_OF_ODD>
  static OCTAVO_INLINE void add_inputs(Sums& sums, const bf16* x, int64_t stride,
                                       const bf16* weights) {
    const auto low = Isa::operand(weights), high = Isa::operand(weights + kPanel);
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; ++r) {
      const bf16* from = x + r * stride;
      const auto pair = LAST_OF_ODD ? Isa::one_input(from) : Isa::broadcast(from);
      sums[r][0] = Isa::dot(sums[r][0], low, pair);
      sums[r][1] = Isa::dot(sums[r][1], high, pair);
    }
  }
};

// A tile of a number of rows known at run time, 1 .. ROWS.
template <class Isa, int ROWS = kMaxRows>
OCTAVO_INLINE void multiply_tile(int64_t rows, const Product& product, int64_t row, int64_t panel,
                                 Ahead ahead) {
  if (rows == ROWS) return Tile<Isa, ROWS>::multiply(product, row, panel, ahead);
  if constexpr (ROWS > 1) multiply_tile<Isa, ROWS - 1>(rows, product, row, panel, ahead);
}

// Rows begin .. end of a panel, in tiles of nearly equal size. Where they are several, each of them
// fetches its share of the next panel: the first alone would wait for the memory, the others not.
template <class Isa>
void multiply_panel(const Product& product, int64_t begin, int64_t end, int64_t panel) {
  const int64_t rows = end - begin, tiles = ceil_div(rows, kMaxRows), size = product.panel_size();
  const bf16* weights = product.linear.weights + panel * size;
  for (int64_t tile = 0; tile < tiles; ++tile) {
    const int64_t row = begin + rows * tile / tiles, next = begin + rows * (tile + 1) / tiles;
    Ahead ahead{weights + kAhead, 2 * kPanel};
    if (tiles > 1) ahead = {weights + size + size * tile / tiles, ceil_div(2 * kPanel, tiles)};
    multiply_tile<Isa>(next - row, product, row, panel, ahead);
  }
}

// Where the rows of x would meet in so few sets of the L1 cache that a tile's do not fit, they are
// copied to places further apart. Null elsewhere, or if there is no memory, which costs only time.
inline bf16* place_apart(const Product& product) {
  const int64_t inputs = product.linear.inputs;
  if (product.rows < kMaxRows / 2 || inputs % kConflict != 0) return nullptr;
  return static_cast<bf16*>(std::malloc(product.rows * (inputs + kApart) * sizeof(bf16)));
}

// A task is a panel of a chunk of rows. A thread's tasks follow one another, since each fetches
// weights of the next.
template <class Isa>
void multiply(const Product& given) {
  Product product = given;
  bf16* const copy = place_apart(given);
  if (copy) {
    product.x = copy;
    product.stride = given.linear.inputs + kApart;
  }
  const int64_t panels = product.panels(), chunks = ceil_div(product.rows, kChunk);
  const bool alone = product.rows * panels * product.panel_size() <= kSerial;
#pragma omp parallel if (!alone)
  {
    if (copy) {
#pragma omp for schedule(static)
      for (int64_t row = 0; row < product.rows; ++row)
        std::memcpy(copy + row * product.stride, given.x + row * given.stride,
                    given.linear.inputs * sizeof(bf16));
    }
#pragma omp for schedule(static)
    for (int64_t task = 0; task < chunks * panels; ++task) {
      const int64_t chunk = task / panels;
      multiply_panel<Isa>(product, product.rows * chunk / chunks,
                          product.rows * (chunk + 1) / chunks, task % panels);
    }
  }
  std::free(copy);
}

}  // namespace
}  // namespace octavo
