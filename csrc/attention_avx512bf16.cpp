// Attention in BF16 by VDPBF16PS: pairs of products summed in FP32.
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma")

#include "attention.h"
#include "attention_avx512_vectors.h"

namespace octavo {
namespace {

struct Bf16 : Avx512 {
  using Element = bf16;
  using Operand = __m512bh;
  static constexpr int kStep = 2;

  static Operand operand(const Element* x) {
    return reinterpret_cast<Operand>(_mm512_loadu_si512(x));
  }
  static Operand first_half(const Element* x) {
    const __m512i low = _mm512_set1_epi32(0xffff);
    return reinterpret_cast<Operand>(_mm512_and_si512(_mm512_loadu_si512(x), low));
  }
  static Operand broadcast(const void* x) {
    int pair;
    std::memcpy(&pair, x, sizeof pair);
    return reinterpret_cast<Operand>(_mm512_set1_epi32(pair));
  }
  static Vec dot(Vec sum, Operand a, Operand b) { return _mm512_dpbf16_ps(sum, a, b); }
  static Vec load_elements(const Element* x) {
    const __m256i elements = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(elements), 16));
  }
  static void store_elements(Element* x, Vec v) {
    const __m256i elements = reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(v));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(x), elements);
  }
};

}  // namespace
}  // namespace octavo

void octavo_attention_bf16_avx512bf16(const OctavoAttention* step, octavo::bf16* qkv,
                                      octavo::bf16* cache, const octavo::bf16* qk_weight,
                                      const float* sinks, octavo::bf16* out) {
  octavo::attention<octavo::Bf16>(*step, qkv, cache, qk_weight, sinks, out);
}
