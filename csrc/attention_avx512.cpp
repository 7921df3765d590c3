// Attention by AVX-512, in FP32, and in BF16 that is widened to FP32 at each use.
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")

#include "attention.h"
#include "attention_avx512_vectors.h"

namespace octavo {
namespace {

struct Fp32 : Avx512 {
  using Element = float;
  using Operand = __m512;
  static constexpr int kStep = 1;

  static Operand operand(const Element* x) { return load(x); }
  static Operand broadcast(const void* x) { return set(*static_cast<const float*>(x)); }
  static Vec dot(Vec sum, Operand a, Operand b) { return fma(a, b, sum); }
  static Vec load_elements(const Element* x) { return load(x); }
  static void store_elements(Element* x, Vec v) { store(x, v); }
};

struct Bf16 : Avx512 {
  using Element = bf16;
  struct Operand {
    Vec first, second;  // of each pair
  };
  static constexpr int kStep = 2;
  static constexpr int kVectors = 2;  // operands take two registers

  static Operand widened(__m512i pairs) {
    const __m512i high = _mm512_set1_epi32(static_cast<int>(0xffff0000));
    return {_mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16)),
            _mm512_castsi512_ps(_mm512_and_si512(pairs, high))};
  }
  static Operand operand(const Element* x) { return widened(_mm512_loadu_si512(x)); }
  static Operand first_half(const Element* x) { return {operand(x).first, set(0.0f)}; }
  static Operand broadcast(const void* x) {
    int pair;
    std::memcpy(&pair, x, sizeof pair);
    return widened(_mm512_set1_epi32(pair));
  }
  static Vec dot(Vec sum, Operand a, Operand b) {
    return fma(a.second, b.second, fma(a.first, b.first, sum));
  }
  static Vec load_elements(const Element* x) {
    const __m256i elements = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x));
    return widened(_mm512_cvtepu16_epi32(elements)).first;
  }
  // To the nearest, ties to even; what is no number stays none.
  static void store_elements(Element* x, Vec v) {
    const __m512i bits = _mm512_castps_si512(v);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i bias = _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff));
    const __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(bits, bias), 16);
    const __mmask16 none = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
    const __m512i elements = _mm512_mask_mov_epi32(rounded, none, _mm512_set1_epi32(0x7fc0));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(x), _mm512_cvtepi32_epi16(elements));
  }
};

}  // namespace
}  // namespace octavo

void octavo_attention_f32_avx512(const OctavoAttention* step, float* qkv, float* cache,
                                 const float* qk_weight, const float* sinks, float* out) {
  octavo::attention<octavo::Fp32>(*step, qkv, cache, qk_weight, sinks, out);
}

void octavo_attention_bf16_avx512(const OctavoAttention* step, octavo::bf16* qkv,
                                  octavo::bf16* cache, const octavo::bf16* qk_weight,
                                  const float* sinks, octavo::bf16* out) {
  octavo::attention<octavo::Bf16>(*step, qkv, cache, qk_weight, sinks, out);
}
