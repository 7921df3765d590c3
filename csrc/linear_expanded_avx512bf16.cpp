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

inline void fetch_ahead(const char* block, int64_t size) {
  for (int64_t at = 0; at < size; at += kLine)
    __builtin_prefetch(block + kBlocksAhead * size + at, 0, 3);
}

// Codes of BITS bits in words of 16 (expanded_layout.h), of the vector `v` of 32 numbers of a
// block. What is above the code's bits is anything.
template <int BITS>
OCTAVO_INLINE __m512i words_of(const char* block, int v) {
  constexpr int kTaken = BITS == 3 ? 2 : BITS, kCodes = 16 / kTaken;
  const __m512i from = _mm512_loadu_si512(block + v / kCodes * kLine);
  const __m512i codes = _mm512_srl_epi16(from, _mm_cvtsi32_si128(v % kCodes * kTaken));
  if constexpr (BITS != 3) return codes;
  const __m512i third = _mm512_loadu_si512(block + 2 * kBlockCodes / 8 + v / 16 * kLine);
  const __m512i high = _mm512_srl_epi16(third, _mm_cvtsi32_si128(v % 16));
  // The first where the mask is set.
  return _mm512_ternarylogic_epi32(_mm512_set1_epi16(3), codes, _mm512_slli_epi16(high, 2), 0xca);
}
constexpr int kVectors = kBlockCodes / 32;

// A table of all lanes, which stands in a vector as often as it fits there: five bits of an index
// are looked at.
template <int BITS>
void expand_words(const OctavoLinear& linear, const ExpandedLayout& layout, const char* panel,
                  int64_t index, void* to) {
  const char* const block = panel + index * layout.block;
  fetch_ahead(block, layout.block);
  const auto numbers = Expand16<float>::table<BITS>(linear.table);
  const auto table = reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(numbers, numbers));
#pragma GCC unroll 32
  for (int v = 0; v < kVectors; ++v)
    _mm512_storeu_si512(static_cast<char*>(to) + v * kLine,
                        _mm512_permutexvar_epi16(words_of<BITS>(block, v), table));
}

// A table of each lane: a permutation of two vectors looks up in those of some lanes.
template <int BITS>
void expand_words_of_lanes(const OctavoLinear&, const ExpandedLayout& layout, const char* panel,
                           int64_t index, void* to) {
  constexpr int kLanes = 64 >> BITS, kTimes = kHalf / kLanes;
  const char* const block = panel + index * layout.block;
  fetch_ahead(block, layout.block);
  const __m512i mask = _mm512_set1_epi16((1 << BITS) - 1);
  alignas(kLine) uint16_t numbers[2 * kHalf];
  for (int i = 0; i < 2 * kHalf; ++i) numbers[i] = static_cast<uint16_t>(i / 2 << BITS);
  const __m512i lanes = _mm512_load_si512(numbers);
  for (int half = 0; half < 2; ++half) {
    __m512i tables[2 * kTimes];
    const char* const at = panel + layout.tables + half * 2 * kTimes * kLine;
#pragma GCC unroll 8
    for (int i = 0; i < 2 * kTimes; ++i) tables[i] = _mm512_loadu_si512(at + i * kLine);
#pragma GCC unroll 4
    for (int v = half; v < kVectors; v += 2) {
      // (mask & codes) | lanes
      __m512i found = _mm512_ternarylogic_epi32(mask, words_of<BITS>(block, v), lanes, 0xea);
#pragma GCC unroll 4
      for (int i = 0; i < kTimes; ++i) {
        const auto here = static_cast<__mmask32>(((1ull << 2 * kLanes) - 1) << 2 * kLanes * i);
        found = _mm512_mask2_permutex2var_epi16(tables[2 * i], found, here, tables[2 * i + 1]);
      }
      _mm512_storeu_si512(static_cast<char*>(to) + v * kLine, found);
    }
  }
}

// What the sizes of FP8 are in BF16: their upper and their lower bytes.
struct BytesOfFp8 {
  alignas(kLine) uint8_t upper[128], lower[128];
  explicit BytesOfFp8(int64_t coding) {
    for (int code = 0; code < 128; ++code) {
      const auto half = static_cast<uint16_t>(coding == OCTAVO_E4M3 ? code << 7 : code << 8);
      const uint16_t bits = from_float<bf16>(_cvtsh_ss(half)).bits;
      upper[code] = static_cast<uint8_t>(bits >> 8);
      lower[code] = static_cast<uint8_t>(bits);
    }
  }
};

// FP8 by tables of 128 bytes, which are two vectors.
template <int CODING>
__attribute__((target("avx512vbmi"))) void expand_fp8(const OctavoLinear&,
                                                      const ExpandedLayout& layout,
                                                      const char* panel, int64_t index, void* to) {
  static const BytesOfFp8 tables(CODING);
  const char* const block = panel + index * layout.block;
  for (int64_t at = 0; at < layout.block; at += kLine)
    __builtin_prefetch(block + kBlocksAhead * layout.block + at, 0, 3);
  const __m512i upper = _mm512_load_si512(tables.upper), lower = _mm512_load_si512(tables.lower);
  const __m512i uppers = _mm512_load_si512(tables.upper + kLine);
  const __m512i lowers = _mm512_load_si512(tables.lower + kLine);
  // Eight bytes of each half, in turn: what is unpacked are the lower and upper eight of sixteen.
  const __m512i order = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7);
  const __m512i sign = _mm512_set1_epi8(static_cast<char>(0x80));
  char* out = static_cast<char*>(to);
#pragma GCC unroll 4
  for (int64_t at = 0; at < kBlockCodes; at += kLine, out += 2 * kLine) {
    const __m512i codes = _mm512_permutexvar_epi64(order, _mm512_loadu_si512(block + at));
    const __m512i low = _mm512_permutex2var_epi8(lower, codes, lowers);
    const __m512i size = _mm512_permutex2var_epi8(upper, codes, uppers);
    // (sign & codes) | size
    const __m512i high = _mm512_ternarylogic_epi32(sign, codes, size, 0xea);
    _mm512_storeu_si512(out, _mm512_unpacklo_epi8(low, high));
    _mm512_storeu_si512(out + kLine, _mm512_unpackhi_epi8(low, high));
  }
}

bool has_byte_permutations() {
  static const bool found = __builtin_cpu_supports("avx512vbmi");
  return found;
}

}  // namespace

ExpandBlock* bf16_expander(const OctavoLinear& linear) {
  const int64_t bits = linear.bits;
  const bool scaled = linear.group && !linear.scales_sums;
  if (expanded_layout(linear).narrow) {
    if (linear.coding == OCTAVO_TABLE)
      return bits == 2 ? expand_words<2> : bits == 3 ? expand_words<3> : expand_words<4>;
    return bits == 2   ? expand_words_of_lanes<2>
           : bits == 3 ? expand_words_of_lanes<3>
                       : expand_words_of_lanes<4>;
  }
  if (!scaled && has_byte_permutations()) {
    if (linear.coding == OCTAVO_E4M3) return expand_fp8<OCTAVO_E4M3>;
    if (linear.coding == OCTAVO_E5M2) return expand_fp8<OCTAVO_E5M2>;
  }
  return expander<ExpandPairs>(linear);
}

}  // namespace octavo

// 28 sums, as with dense weights.
void octavo_linear_expanded_bf16_avx512bf16(const void* arguments) {
  octavo::multiply<octavo::Expanded<octavo::Pairs16, 28, octavo::bf16_expander>>(arguments);
}
