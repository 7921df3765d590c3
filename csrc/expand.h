// Blocks of 32 inputs by 32 lanes from codes to numbers (expanded_layout.h).
//
// `Isa` brings, beside its vectors, an Element, Bits of as many words of 32 bits as a Vec has
// numbers, and
//   table<BITS>(from)         a table in registers, look_up<BITS>(table, codes): its numbers
//   gather<BITS>(from, codes) numbers of tables [numbers of a Vec][2^BITS], one for each
//   down<SHIFT>(bits)         words shifted right, or left where it is negative
//   third(low, high)          the lowest two bits of the one, the third of the other
//   bytes(from), e4m3(from), e5m2(from)   bytes as numbers
// Codes may have anything in their bits above. With elements in BF16 a lane's pair of inputs lie
// side by side, and put_pair(to, first, second) rounds 32 numbers.
#pragma once

#include <type_traits>
#include <utility>

#include "expanded_layout.h"

namespace octavo {
namespace {  // see numbers.h

template <class F, int... I>
OCTAVO_INLINE void each_of(const F& f, std::integer_sequence<int, I...>) {
  (f(std::integral_constant<int, I>()), ...);
}
// f(0) .. f(N - 1), each with its number as a constant.
template <int N, class F>
OCTAVO_INLINE void each_of(const F& f) {
  each_of(f, std::make_integer_sequence<int, N>());
}

constexpr int kOctet = 8;  // vectors of 16 elements: four inputs
constexpr int64_t kBlocksAhead = 8;  // whose codes are fetched

// Codes of BITS bits, as the vector K of the octet OCTET: numbers of Isa::kWidth of its elements,
// from `part` vectors on.
template <class Isa, int BITS, int OCTET, int K>
OCTAVO_INLINE typename Isa::Bits codes_of(const char* block, int part) {
  const int64_t at = part * Isa::kWidth * 4;
  if constexpr (BITS == 4) {
    return Isa::template down<4 * K>(Isa::load_bits(block + kLine * OCTET + at));
  } else {
    const auto low = Isa::load_bits(block + kLine * (OCTET / 2) + at);
    const auto two = Isa::template down<2 * (kOctet * (OCTET % 2) + K)>(low);
    if constexpr (BITS == 2) {
      return two;
    } else {
      const auto high = Isa::load_bits(block + 2 * kBlockCodes / 8 + kLine * (OCTET / 4) + at);
      return Isa::third(two, Isa::template down<kOctet * (OCTET % 4) + K - 2>(high));
    }
  }
}

// What codes mean. value<OCTET, K>(block, part): see codes_of.
template <class Isa, int BITS>
struct OfTable {
  typename Isa::Table table;
  OfTable(const OctavoLinear& linear, const char*)
      : table(Isa::template table<BITS>(linear.table)) {}
  template <int OCTET, int K>
  OCTAVO_INLINE typename Isa::Vec value(const char* block, int part) const {
    return Isa::template look_up<BITS>(table, codes_of<Isa, BITS, OCTET, K>(block, part));
  }
};

template <class Isa, int BITS>
struct OfTables {
  const float* tables;
  OfTables(const OctavoLinear&, const char* from) : tables(reinterpret_cast<const float*>(from)) {}
  template <int OCTET, int K>
  OCTAVO_INLINE typename Isa::Vec value(const char* block, int part) const {
    constexpr bool kPaired = sizeof(typename Isa::Element) == sizeof(bf16);
    const int first = kPaired ? K % 4 * 8 : K % 2 * 16;
    return Isa::template gather<BITS>(tables + ((first + part * Isa::kWidth) << BITS),
                                      codes_of<Isa, BITS, OCTET, K>(block, part));
  }
};

template <class Isa, int CODING>
struct OfBytes {
  typename Isa::Vec zero;
  OfBytes(const OctavoLinear& linear, const char*)
      : zero(Isa::set(static_cast<float>(linear.zero))) {}
  template <int OCTET, int K>
  OCTAVO_INLINE typename Isa::Vec value(const char* block, int part) const {
    const char* at = block + 16 * (kOctet * OCTET + K) + part * Isa::kWidth;
    if constexpr (CODING == OCTAVO_E4M3) {
      return Isa::e4m3(at);
    } else if constexpr (CODING == OCTAVO_E5M2) {
      return Isa::e5m2(at);
    } else {
      return Isa::sub(Isa::bytes(at), zero);
    }
  }
};

// What a group's scales, zeros and minimums are for the elements of an octet, whose vectors of 16
// repeat after two in FP32, after four in BF16.
template <class Isa>
struct OfGroup {
  static constexpr bool kPaired = sizeof(typename Isa::Element) == sizeof(bf16);
  static constexpr int kPeriod = kPaired ? 4 : 2, kParts = 16 / Isa::kWidth;
  using Vec = typename Isa::Vec;
  Vec scales[kPeriod * kParts], zeros[kPeriod * kParts], minimums[kPeriod * kParts];

  template <bool OFFSET>
  OCTAVO_INLINE void load(const OctavoLinear& linear, const ExpandedLayout& layout,
                          const char* panel, int64_t input) {
    const int64_t first = least(input / linear.group, layout.groups - 1) * kPanel;
    load_lanes(panel + layout.scales + first * layout.scale, linear.wide_scales, scales);
    if constexpr (OFFSET) {
      for (int i = 0; i < kPeriod * kParts; ++i) zeros[i] = minimums[i] = Isa::set(0.0f);
      if (linear.has_minimums)
        load_lanes(panel + layout.minimums + first * layout.scale, linear.wide_scales, minimums);
      if (linear.has_zeros) {
        alignas(64) float lanes[kPanel];
        for (int i = 0; i < kPanel; i += Isa::kWidth)
          Isa::store(lanes + i, Isa::bytes(panel + layout.zeros + first + i));
        spread(lanes, zeros);
      }
    }
  }

 private:
  static OCTAVO_INLINE void load_lanes(const char* from, bool wide, Vec* to) {
    if (wide) return spread(reinterpret_cast<const float*>(from), to);
    alignas(64) float lanes[kPanel];
    for (int i = 0; i < kPanel; i += Isa::kWidth)
      Isa::store(lanes + i, Isa::load_halves(reinterpret_cast<const uint16_t*>(from) + i));
    spread(lanes, to);
  }
  static OCTAVO_INLINE void spread(const float* lanes, Vec* to) {
    for (int i = 0; i < kPeriod * kParts; ++i) {
      if constexpr (kPaired) {
        to[i] = Isa::twice(lanes + 8 * i);
      } else {
        to[i] = Isa::load(lanes + Isa::kWidth * i);
      }
    }
  }
};

// SCALED: there are scales of groups. OFFSET: and zeros or minimums.
template <class Isa, class Coding, bool SCALED, bool OFFSET>
void expand_block(const OctavoLinear& linear, const ExpandedLayout& layout, const char* panel,
                  int64_t index, void* to) {
  using Vec = typename Isa::Vec;
  using Group = OfGroup<Isa>;
  const Coding coding(linear, panel + layout.tables);
  const char* const block = panel + index * layout.block;
  for (int64_t at = 0; at < layout.block; at += kLine)
    __builtin_prefetch(block + kBlocksAhead * layout.block + at, 0, 3);
  auto* const out = static_cast<typename Isa::Element*>(to);
  Group group;
  const bool several = SCALED && linear.group % kBlock;  // groups in a block
  if (SCALED && !several) group.template load<OFFSET>(linear, layout, panel, index * kBlock);
  each_of<kBlock / 4>([&](auto octet) __attribute__((always_inline)) {
    if (several) group.template load<OFFSET>(linear, layout, panel, index * kBlock + 4 * octet);
    for (int part = 0; part < Group::kParts; ++part) {
      Vec before;
      each_of<kOctet>([&](auto k) __attribute__((always_inline)) {
        Vec value = coding.template value<decltype(octet)::value, decltype(k)::value>(block, part);
        if constexpr (SCALED) {
          const int of = k % Group::kPeriod * Group::kParts + part;
          if constexpr (OFFSET) value = Isa::sub(value, group.zeros[of]);
          value = Isa::mul(value, group.scales[of]);
          if constexpr (OFFSET) value = Isa::add(value, group.minimums[of]);
        }
        const int64_t at = 16 * (kOctet * octet + k) + part * Isa::kWidth;
        if constexpr (!Group::kPaired) {
          Isa::store(out + at, value);
        } else if constexpr (decltype(k)::value % 2) {
          Isa::put_pair(out + at - 16, before, value);
        } else {
          before = value;
        }
      });
    }
  });
}

// What expands the weights of a linear.
template <class Isa, class Coding>
ExpandBlock* with_scales(const OctavoLinear& linear) {
  if (!linear.group || linear.scales_sums) return expand_block<Isa, Coding, false, false>;
  if (linear.has_minimums || linear.has_zeros) return expand_block<Isa, Coding, true, true>;
  return expand_block<Isa, Coding, true, false>;
}
template <class Isa, template <class, int> class Coding>
ExpandBlock* of_bits(const OctavoLinear& linear) {
  if (linear.bits == 2) return with_scales<Isa, Coding<Isa, 2>>(linear);
  if (linear.bits == 3) return with_scales<Isa, Coding<Isa, 3>>(linear);
  return with_scales<Isa, Coding<Isa, 4>>(linear);
}
template <class Isa>
ExpandBlock* expander(const OctavoLinear& linear) {
  switch (linear.coding) {
    case OCTAVO_TABLE: return of_bits<Isa, OfTable>(linear);
    case OCTAVO_TABLES: return of_bits<Isa, OfTables>(linear);
    case OCTAVO_BYTES: return with_scales<Isa, OfBytes<Isa, OCTAVO_BYTES>>(linear);
    case OCTAVO_E4M3: return with_scales<Isa, OfBytes<Isa, OCTAVO_E4M3>>(linear);
    default: return with_scales<Isa, OfBytes<Isa, OCTAVO_E5M2>>(linear);
  }
}

}  // namespace
}  // namespace octavo
