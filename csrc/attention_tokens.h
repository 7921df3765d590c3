// New tokens of a step: q/k norm, rotation, the writing of keys and values into the cache.
#pragma once

#include <cstring>

#include "attention_layout.h"
#include "rounding.h"

namespace octavo {
namespace {  // see numbers.h

template <class Isa>
inline void widen(const typename Isa::Element* x, int64_t count, float* found) {
  int64_t i = 0;
  for (; i + Isa::kWidth <= count; i += Isa::kWidth) {
    Isa::store(found + i, Isa::load(x + i));
  }
  for (; i < count; ++i) found[i] = to_float(x[i]);
}

// Writes x * scale.
template <class Isa>
inline void narrow(const float* x, float scale, int64_t count, typename Isa::Element* found) {
  int64_t i = 0;
  for (; i + Isa::kWidth <= count; i += Isa::kWidth) {
    Isa::store(found + i, Isa::mul(Isa::load(x + i), Isa::set(scale)));
  }
  for (; i < count; ++i) found[i] = from_float<typename Isa::Element>(x[i] * scale);
}

template <class Isa>
inline void normalize(float* x, const typename Isa::Element* weight, int64_t dim, float eps) {
  auto squares = Isa::set(0.0f);
  int64_t i = 0;
  for (; i + Isa::kWidth <= dim; i += Isa::kWidth) {
    const auto v = Isa::load(x + i);
    squares = Isa::fma(v, v, squares);
  }
  float sum = Isa::sum(squares);
  for (; i < dim; ++i) sum = __builtin_fmaf(x[i], x[i], sum);
  const float scale = 1.0f / __builtin_sqrtf(sum / static_cast<float>(dim) + eps);
  float weights[kMaxDim];
  widen<Isa>(weight, dim, weights);
  for (int64_t j = 0; j < dim; ++j) x[j] = x[j] * scale * weights[j];
}

// Pairs (i, i + half) turn by their angle.
template <class Isa>
inline void rotate(float* x, const float* cos, const float* sin, int64_t half) {
  int64_t i = 0;
  for (; i + Isa::kWidth <= half; i += Isa::kWidth) {
    const auto c = Isa::load(cos + i), s = Isa::load(sin + i);
    const auto first = Isa::load(x + i), second = Isa::load(x + half + i);
    Isa::store(x + i, Isa::sub(Isa::mul(first, c), Isa::mul(second, s)));
    Isa::store(x + half + i, Isa::fma(second, c, Isa::mul(first, s)));
  }
  for (; i < half; ++i) {
    const float first = x[i], second = x[half + i];
    x[i] = first * cos[i] - second * sin[i];
    x[half + i] = second * cos[i] + first * sin[i];
  }
}

// Where a token's key and value stand in tiles of the cache.
struct Slot {
  int64_t block, tile, lane;

  Slot(const OctavoAttention& step, int64_t token)
      : block(step.slots[token] / step.block_size),
        tile(step.slots[token] % step.block_size / kTile),
        lane(step.slots[token] % step.block_size % kTile) {}
};

// Puts a token's numbers where they stand in a tile: steps of kStep, `apart` numbers from one to the
// next.
template <class T, int kStep>
inline void scatter(const T* x, int64_t dim, int64_t apart, T* to) {
  for (int64_t i = 0; i < dim; i += kStep) std::memcpy(to + i / kStep * apart, x + i, kStep * sizeof(T));
}

// The same for a rounded cache; its scale stands after the tile's numbers.
template <int kStep>
inline void scatter_rounded(const float* x, int64_t dim, int64_t apart, int8_t* to, float* scale) {
  alignas(64) int8_t codes[kMaxDim];
  const float top = largest_of(x, dim);
  round_to(codes, x, dim, levels_per(top));
  scatter<int8_t, kStep>(codes, dim, apart, to);
  *scale = top / kLevels;
}

// Queries are rotated in place, keys and values written to the cache.
template <class Isa>
void enter_token(const Layer<Isa>& layer, int64_t token) {
  using Element = typename Isa::Element;
  constexpr int64_t kStep = Isa::kStep;
  const OctavoAttention& step = layer.step;
  const int64_t dim = layer.dim(), half = dim / 2, width = layer.width();
  const Slot slot(step, token);
  Element* const heads = layer.qkv + token * layer.token_width();
  alignas(64) float x[kMaxDim];
  for (int64_t head = 0; head < step.num_heads + step.num_kv_heads; ++head) {
    Element* const source = heads + head * dim;
    widen<Isa>(source, dim, x);
    if (layer.qk_weight) {
      normalize<Isa>(x, layer.qk_weight + head * dim, dim, step.qk_norm_eps);
    }
    rotate<Isa>(x, step.cos + token * half, step.sin + token * half, half);
    if (head < step.num_heads || !step.rounded) narrow<Isa>(x, 1.0f, dim, source);
    if (head < step.num_heads) continue;
    char* const tile = layer.tile(slot.block, head - step.num_heads, 0, slot.tile);
    const int64_t at = slot.lane * kStep;
    if (step.rounded) {
      float* const scales = reinterpret_cast<float*>(tile + layer.tile_elements());
      scatter_rounded<kStep>(x, dim, kTile * kStep, reinterpret_cast<int8_t*>(tile) + at,
                             scales + slot.lane);
    } else {
      scatter<Element, kStep>(source, dim, kTile * kStep, reinterpret_cast<Element*>(tile) + at);
    }
  }
  for (int64_t head = 0; head < step.num_kv_heads; ++head) {
    const Element* const source = heads + (step.num_heads + step.num_kv_heads + head) * dim;
    char* const tile = layer.tile(slot.block, head, 1, slot.tile);
    const int64_t at = slot.lane / kStep * width * kStep + slot.lane % kStep;
    if (step.rounded) {
      float* const scales = reinterpret_cast<float*>(tile + layer.tile_elements());
      widen<Isa>(source, dim, x);
      scatter_rounded<1>(x, dim, kStep, reinterpret_cast<int8_t*>(tile) + at, scales + slot.lane);
    } else {
      scatter<Element, 1>(source, dim, kStep, reinterpret_cast<Element*>(tile) + at);
    }
  }
}

}  // namespace
}  // namespace octavo
