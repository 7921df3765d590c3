// Linears by AVX2: in FP32, and on quantized weights by VPMADDUBSW.
#pragma GCC target("avx2,fma,f16c")

#include "elements.h"
#include "linear_dense.h"
#include "linear_quantized.h"
#include "vectors_avx2.h"

namespace octavo {
namespace {

struct Dense8 : Fp32<Avx2> {
  static Operand one_input(const Element*) { return set(0.0f); }  // there is no odd one
};

// VPMADDUBSW adds two products of an unsigned and a signed number in 16 bits. Codes of up to 4 bits
// are unsigned and never too large for that. Of 8 bits they are taken less 128: their size times the
// inputs with their sign, at most 128 * 127 * 2.
struct Madd : Avx2 {
  using Ints = __m256i;
  template <int BITS>
  static constexpr int kOffset = BITS == 8 ? 128 : 0;

  template <int BITS>
  static OCTAVO_INLINE void codes(const char* from, int quad, Ints (&to)[4]) {
    if constexpr (BITS < 4) {
      for (int i = 0; i < 4; ++i) {
        const char* const at = from + i % 2 * sizeof(Ints);
        const Ints two = down(load_bits(at + quad / 2 * kLine), quad % 2 * 4 + i / 2 * 2);
        to[i] = _mm256_and_si256(two, _mm256_set1_epi8(3));
        if constexpr (BITS == 3) {
          const Ints third = down(load_bits(at + 2 * kLine), quad * 2 + i / 2 - 2);
          to[i] = _mm256_or_si256(to[i], _mm256_and_si256(third, _mm256_set1_epi8(4)));
        }
      }
    } else if constexpr (BITS == 4) {
      const Ints low = _mm256_set1_epi8(15);
      for (int i = 0; i < 2; ++i) {
        const Ints both = load_bits(from + i * sizeof(Ints));
        to[i] = _mm256_and_si256(both, low);
        to[2 + i] = _mm256_and_si256(_mm256_srli_epi16(both, 4), low);
      }
    } else {
      const Ints offset = _mm256_set1_epi8(static_cast<char>(0x80));
      for (int i = 0; i < 4; ++i)
        to[i] = _mm256_xor_si256(load_bits(from + i * sizeof(Ints)), offset);
    }
  }
  template <int BITS>
  static OCTAVO_INLINE Ints dot(Ints sums, Ints codes, Ints quad) {
    const Ints pairs =
        BITS < 8 ? _mm256_maddubs_epi16(codes, quad)
                 : _mm256_maddubs_epi16(_mm256_abs_epi8(codes), _mm256_sign_epi8(quad, codes));
    return _mm256_add_epi32(sums, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
  }
  // Words of 16 bits shifted right, or left where the count is negative.
  static OCTAVO_INLINE Ints down(Ints bits, int count) {
    if (count < 0) return _mm256_sll_epi16(bits, _mm_cvtsi32_si128(-count));
    return _mm256_srl_epi16(bits, _mm_cvtsi32_si128(count));
  }
  static OCTAVO_INLINE Ints set_ints(int x) { return _mm256_set1_epi32(x); }
  static OCTAVO_INLINE Ints quad(const int8_t* from) {
    int four;
    std::memcpy(&four, from, sizeof four);
    return set_ints(four);
  }
  static OCTAVO_INLINE Vec floats(Ints ints) { return _mm256_cvtepi32_ps(ints); }
  static OCTAVO_INLINE Vec load_halves(const uint16_t* from) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
  }
};

}  // namespace
}  // namespace octavo

// 12 sums, and 3 of 16 registers for weights and inputs.
void octavo_linear_f32_avx2(const void* arguments) {
  octavo::multiply<octavo::Dense<octavo::Dense8, 12>>(arguments);
}

void octavo_linear_quantized_avx2(const void* arguments) {
  octavo::multiply_quantized<octavo::Madd, 2>(arguments);
}
