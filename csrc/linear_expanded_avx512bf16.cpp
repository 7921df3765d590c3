// Linears on weights that are expanded to BF16, by VDPBF16PS.
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma,f16c")

#include "expand.h"
#include "expand_avx512.h"
#include "linear_expanded.h"
#include "vectors_avx512bf16.h"

namespace octavo {
namespace {

struct Pairs16 : Avx512Bf16 {
  static OCTAVO_INLINE Operand one_input(const bf16* from) {
    return reinterpret_cast<Operand>(set_bits(from->bits));
  }
};

struct ExpandPairs : Expand16<bf16> {
  static OCTAVO_INLINE void put_pair(bf16* to, Vec first, Vec second) {
    _mm512_storeu_si512(to, reinterpret_cast<Bits>(_mm512_cvtne2ps_pbh(second, first)));
  }
};

// Codes into tables of lanes in BF16, from words of 16 bits (expanded_layout.h). A permutation of
// two vectors looks up in the tables of so many lanes.
template <int BITS>
void expand_words(const OctavoLinear&, const ExpandedLayout& layout, const char* panel,
                  int64_t index, void* to) {
  constexpr int kLanes = 64 >> BITS, kTimes = kHalf / kLanes;
  constexpr int kCodes = 16 / (BITS == 3 ? 2 : BITS);  // of a word
  const char* const block = panel + index * layout.block;
  for (int64_t at = 0; at < layout.block; at += kLine)
    __builtin_prefetch(block + 4096 + at, 0, 3);
  const __m512i mask = _mm512_set1_epi16((1 << BITS) - 1);
  alignas(kLine) uint16_t numbers[2 * kHalf];
  for (int i = 0; i < 2 * kHalf; ++i) numbers[i] = static_cast<uint16_t>(i / 2 << BITS);
  const __m512i lanes = _mm512_load_si512(numbers);
  for (int half = 0; half < 2; ++half) {
    __m512i tables[2 * kTimes];
    const char* const at = panel + layout.tables + half * 2 * kTimes * kLine;
#pragma GCC unroll 8
    for (int i = 0; i < 2 * kTimes; ++i) tables[i] = _mm512_loadu_si512(at + i * kLine);
    char* out = static_cast<char*>(to) + half * kLine;
    for (int v = half; v < kBlockCodes / (2 * kHalf); v += 2, out += 2 * kLine) {
      const char* const from = block + v / kCodes * kLine;
      __m512i codes = _mm512_srl_epi16(
          _mm512_loadu_si512(from), _mm_cvtsi32_si128(v % kCodes * (16 / kCodes)));
      if constexpr (BITS == 3) {
        const char* const third = block + 2 * kBlockCodes / 8 + v / 16 * kLine;
        const __m512i high = _mm512_slli_epi16(
            _mm512_srl_epi16(_mm512_loadu_si512(third), _mm_cvtsi32_si128(v % 16)), 2);
        codes = _mm512_ternarylogic_epi32(_mm512_set1_epi16(3), codes, high, 0xca);
      }
      __m512i found = _mm512_ternarylogic_epi32(mask, codes, lanes, 0xea);  // (mask & codes) | lanes
#pragma GCC unroll 4
      for (int i = 0; i < kTimes; ++i) {
        const auto here = static_cast<__mmask32>(((1ull << 2 * kLanes) - 1) << 2 * kLanes * i);
        found = _mm512_mask2_permutex2var_epi16(tables[2 * i], found, here, tables[2 * i + 1]);
      }
      _mm512_storeu_si512(out, found);
    }
  }
}

}  // namespace

ExpandBlock* bf16_expander(const OctavoLinear& linear) {
  if (!expanded_layout(linear).narrow) return expander<ExpandPairs>(linear);
  return linear.bits == 2 ? expand_words<2> : linear.bits == 3 ? expand_words<3> : expand_words<4>;
}

}  // namespace octavo

// 28 sums, as with dense weights.
void octavo_linear_expanded_bf16_avx512bf16(const void* arguments) {
  octavo::multiply<octavo::Expanded<octavo::Pairs16, 28, octavo::bf16_expander>>(arguments);
}
