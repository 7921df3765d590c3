// Tiles of a cache of 8 bits (attention_layout.h) as elements, a piece at a time: what multiplies
// them need not know, and the memory is asked for half as much as with BF16. FP8 numbers are whole
// elements, so the scales of their heads wait for scores and sums.
#pragma once

#include "attention_layout.h"
#include "spare_memory.h"

namespace octavo {
namespace {  // see numbers.h

// Numbers times the factors that repeat after every `period` of them, both multiples of a vector.
template <class Isa>
inline void expand(const int8_t* from, int64_t count, const float* factors, int64_t period,
                   typename Isa::Element* to) {
  for (int64_t i = 0; i < count; i += period) {
    for (int64_t j = 0; j < period; j += Isa::kWidth)
      Isa::store(to + i + j, Isa::mul(Isa::load(from + i + j), Isa::load(factors + j)));
  }
}

// A tile of keys, [dim / kStep][16 tokens][kStep]; `size`: its numbers.
template <class Isa>
inline void expand_keys(const char* tile, int64_t size, typename Isa::Element* to) {
  constexpr int kPeriod = kTile * Isa::kStep;
  const float* const scales = reinterpret_cast<const float*>(tile + size);
  alignas(64) float factors[kPeriod];
  for (int i = 0; i < kPeriod; ++i) factors[i] = scales[i / Isa::kStep];
  expand<Isa>(reinterpret_cast<const int8_t*>(tile), size, factors, kPeriod, to);
}

// A tile of values, [16 tokens / kStep][width][kStep].
template <class Isa>
inline void expand_values(const char* tile, int64_t width, typename Isa::Element* to) {
  constexpr int kStep = Isa::kStep;
  const float* const scales = reinterpret_cast<const float*>(tile + kTile * width);
  const int64_t row = width * kStep;
  for (int s = 0; s < kTile / kStep; ++s) {
    alignas(64) float factors[kTile];
    for (int i = 0; i < kTile; ++i) factors[i] = scales[s * kStep + i % kStep];
    expand<Isa>(reinterpret_cast<const int8_t*>(tile) + s * row, row, factors, kTile,
                to + s * row);
  }
}

// A tile of FP8, of `size` numbers.
template <class Isa, class Code>
inline void expand_float8(const char* tile, int64_t size, typename Isa::Element* to) {
  const Code* const codes = reinterpret_cast<const Code*>(tile);
  for (int64_t i = 0; i < size; i += Isa::kWidth) Isa::store(to + i, Isa::load(codes + i));
}

// A tile of keys and one of values.
template <class Isa>
inline void expand_tiles(const Layer<Isa>& layer, const char* const (&tiles)[2],
                         typename Isa::Element* keys, typename Isa::Element* values) {
  const int64_t size = layer.tile_elements();
  if (layer.step.kept == OCTAVO_KEPT_INT8) {
    expand_keys<Isa>(tiles[0], size, keys);
    expand_values<Isa>(tiles[1], layer.width(), values);
  } else if (layer.step.kept == OCTAVO_KEPT_E4M3) {
    expand_float8<Isa, e4m3>(tiles[0], size, keys);
    expand_float8<Isa, e4m3>(tiles[1], size, values);
  } else {
    expand_float8<Isa, e5m2>(tiles[0], size, keys);
    expand_float8<Isa, e5m2>(tiles[1], size, values);
  }
}

}  // namespace
}  // namespace octavo
