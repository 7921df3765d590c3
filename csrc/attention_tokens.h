// New tokens of a step: q/k norm, rotation, the writing of keys and values into the cache.
#pragma once

#include <cstring>

#include "attention_layout.h"
#include "float8.h"

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

// What a cache of 8 bits keeps of a token's key or value. `token_scale`: its own, for int8; `scale`:
// that of its head, for FP8.
inline void round_token(int64_t kept, const float* x, int64_t dim, float scale, int8_t* codes,
                        float* token_scale) {
  if (kept == OCTAVO_KEPT_INT8) {
    const float top = largest_of(x, dim);
    round_to(codes, x, dim, levels_per(top));
    *token_scale = top / kLevels;
  } else if (kept == OCTAVO_KEPT_E4M3) {
    for (int64_t i = 0; i < dim; ++i)
      codes[i] = static_cast<int8_t>(Float8<e4m3>::encode(x[i] / scale));
  } else {
    for (int64_t i = 0; i < dim; ++i)
      codes[i] = static_cast<int8_t>(Float8<e5m2>::encode(x[i] / scale));
  }
}

// Puts a token's key or value, as elements and in FP32, into its tile: from number `at` of it on,
// steps of kStep, `apart` numbers from one to the next.
template <class Isa, int kStep>
inline void enter(const Layer<Isa>& layer, const float* x, const typename Isa::Element* elements,
                  int64_t lane, int64_t at, int64_t apart, float scale, char* tile) {
  using Element = typename Isa::Element;
  if (!layer.step.kept) {
    scatter<Element, kStep>(elements, layer.dim(), apart, reinterpret_cast<Element*>(tile) + at);
    return;
  }
  alignas(64) int8_t codes[kMaxDim];
  float* const scales = reinterpret_cast<float*>(tile + layer.tile_elements());
  round_token(layer.step.kept, x, layer.dim(), scale, codes, scales + lane);
  scatter<int8_t, kStep>(codes, layer.dim(), apart, reinterpret_cast<int8_t*>(tile) + at);
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
    if (head < step.num_heads || !step.kept) narrow<Isa>(x, 1.0f, dim, source);
    if (head < step.num_heads) continue;
    const int64_t kv_head = head - step.num_heads;
    enter<Isa, kStep>(layer, x, source, slot.lane, slot.lane * kStep, kTile * kStep,
                      layer.kept_scale(kv_head, 0), layer.tile(slot.block, kv_head, 0, slot.tile));
  }
  for (int64_t head = 0; head < step.num_kv_heads; ++head) {
    const Element* const source = heads + (step.num_heads + step.num_kv_heads + head) * dim;
    if (step.kept) widen<Isa>(source, dim, x);
    enter<Isa, 1>(layer, x, source, slot.lane, slot.lane / kStep * width * kStep + slot.lane % kStep,
                  kStep, layer.kept_scale(head, 1), layer.tile(slot.block, head, 1, slot.tile));
  }
}

}  // namespace
}  // namespace octavo
