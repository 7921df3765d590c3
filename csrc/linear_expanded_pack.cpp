// Packing weights that are expanded where they are multiplied, once, and reading rows of them back.
#pragma GCC target("avx2,fma,f16c")

#include <immintrin.h>

#include "expanded_layout.h"
#include "spare_memory.h"

namespace octavo {
namespace {

struct Place {
  int64_t byte;
  int shift;
};
// Of BITS bits of an element, in words of WORD bits (expanded_layout.h).
template <int BITS, int WORD>
OCTAVO_INLINE Place place_of(int64_t element) {
  constexpr int64_t across = 8 * kLine / WORD, codes = WORD / BITS;
  const int64_t vector = element / across, k = vector % codes;
  const int64_t word = vector / codes * across + element % across;
  return {word * (WORD / 8) + k * BITS / 8, static_cast<int>(k * BITS % 8)};
}
template <int BITS, int WORD>
OCTAVO_INLINE void put_plane(char* block, int64_t element, int code) {
  const Place at = place_of<BITS, WORD>(element);
  block[at.byte] |= static_cast<char>(code << at.shift);
}
template <int BITS, int WORD>
OCTAVO_INLINE int take_plane(const char* block, int64_t element) {
  const Place at = place_of<BITS, WORD>(element);
  return static_cast<uint8_t>(block[at.byte]) >> at.shift & ((1 << BITS) - 1);
}

constexpr int64_t kThirds = 2 * kBlockCodes / 8;  // where they begin

template <int BITS, int WORD>
struct Codes {
  static OCTAVO_INLINE void put(char* block, int64_t element, int code) {
    if constexpr (BITS == 8) {
      block[element] = static_cast<char>(code);
    } else if constexpr (BITS == 3) {
      put_plane<2, WORD>(block, element, code & 3);
      put_plane<1, WORD>(block + kThirds, element, code >> 2);
    } else {
      put_plane<BITS, WORD>(block, element, code);
    }
  }
  static OCTAVO_INLINE int take(const char* block, int64_t element) {
    if constexpr (BITS == 8) {
      return static_cast<uint8_t>(block[element]);
    } else if constexpr (BITS == 3) {
      return take_plane<2, WORD>(block, element) |
             take_plane<1, WORD>(block + kThirds, element) << 2;
    } else {
      return take_plane<BITS, WORD>(block, element);
    }
  }
};

// f(Codes of the linear).
template <class F>
void with_codes(const OctavoLinear& linear, bool narrow, const F& f) {
  switch (linear.bits) {
    case 2: return narrow ? f(Codes<2, 16>()) : f(Codes<2, 32>());
    case 3: return narrow ? f(Codes<3, 16>()) : f(Codes<3, 32>());
    case 4: return narrow ? f(Codes<4, 16>()) : f(Codes<4, 32>());
    default: return f(Codes<8, 32>());
  }
}

// A row of weights into a lane of a panel.
template <class Codes>
void pack_row(const OctavoLinear& linear, const ExpandedLayout& layout, Codes,
              const OctavoExpandedRows& from, int64_t row, char* panel, int64_t lane) {
  const uint8_t* const codes = from.codes + row * linear.inputs;
  for (int64_t i = 0; i < linear.inputs; ++i)
    Codes::put(panel + i / kBlock * layout.block, dense_element(layout.paired, lane, i % kBlock),
               codes[i]);
  for (int64_t g = 0; g < layout.groups; ++g) {
    const int64_t at = g * kPanel + lane, of = row * layout.groups + g, size = layout.scale;
    std::memcpy(panel + layout.scales + at * size,
                static_cast<const char*>(from.scales) + of * size, size);
    if (linear.has_minimums)
      std::memcpy(panel + layout.minimums + at * size,
                  static_cast<const char*>(from.minimums) + of * size, size);
    if (linear.has_zeros) panel[layout.zeros + at] = static_cast<char>(from.zeros[of]);
  }
  if (linear.coding != OCTAVO_TABLES) return;
  const int64_t size = int64_t{1} << linear.bits;
  for (int64_t i = 0; i < size; ++i) {
    const float number = from.tables[row * size + i];
    if (layout.narrow) {
      reinterpret_cast<bf16*>(panel + layout.tables)[lane * size + i] = from_float<bf16>(number);
    } else {
      reinterpret_cast<float*>(panel + layout.tables)[lane * size + i] = number;
    }
  }
}

float read_number(const OctavoLinear& linear, const char* from, int64_t at) {
  if (linear.wide_scales) return reinterpret_cast<const float*>(from)[at];
  return _cvtsh_ss(reinterpret_cast<const uint16_t*>(from)[at]);
}

float value_of(const OctavoLinear& linear, const ExpandedLayout& layout, const char* panel,
               int64_t lane, int code) {
  const int64_t at = (lane << linear.bits) + code;
  switch (linear.coding) {
    case OCTAVO_TABLE: return linear.table[code];
    case OCTAVO_TABLES:
      return layout.narrow ? to_float(reinterpret_cast<const bf16*>(panel + layout.tables)[at])
                           : reinterpret_cast<const float*>(panel + layout.tables)[at];
    case OCTAVO_BYTES: return static_cast<float>(code - static_cast<int>(linear.zero));
    case OCTAVO_E4M3:
      return _cvtsh_ss(static_cast<uint16_t>((code & 128) << 8 | (code & 127) << 7));
    default: return _cvtsh_ss(static_cast<uint16_t>(code << 8));
  }
}

// A row of the weights in FP32, in the order they are packed in.
template <class Codes>
void expand_row(const OctavoLinear& linear, Codes, int64_t id, float* to) {
  const ExpandedLayout layout = expanded_layout(linear);
  const int64_t index = id / kPanel, lane = id % kPanel;
  const char* const panel = static_cast<const char*>(linear.weights) + index * layout.end;
  for (int64_t i = 0; i < linear.inputs; ++i) {
    const int code = Codes::take(panel + i / kBlock * layout.block,
                                 dense_element(layout.paired, lane, i % kBlock));
    float value = value_of(linear, layout, panel, lane, code);
    if (layout.groups) {
      const int64_t at = i / linear.group * kPanel + lane;
      if (linear.has_zeros) value -= static_cast<uint8_t>(panel[layout.zeros + at]);
      value *= read_number(linear, panel + layout.scales, at);
      if (linear.has_minimums) value += read_number(linear, panel + layout.minimums, at);
    }
    if (linear.lane_scales) value *= linear.lane_scales[id];
    to[i] = value;
  }
  if (!linear.outliers) return;
  const OctavoOutliers& from = *linear.outliers;
  for (int64_t i = from.starts[index]; i < from.starts[index + 1]; ++i)
    if (from.lanes[i] == lane) to[from.columns[i]] += from.values[i];
}

template <class T>
void put_row(const OctavoLinear& linear, const float* row, T* y) {
  for (int64_t i = 0; i < linear.inputs; ++i)
    y[linear.order ? linear.order[i] : i] = from_float<T>(row[i]);
}

}  // namespace
}  // namespace octavo

void octavo_linear_pack_expanded(const OctavoLinear* linear, const OctavoExpandedRows* from,
                                 const OctavoPlace* place) {
  using namespace octavo;
  const ExpandedLayout layout = expanded_layout(*linear);
  char* const panels = static_cast<char*>(const_cast<void*>(linear->weights));
  const int64_t end = place->first + place->rows;
  with_codes(*linear, layout.narrow, [&](auto codes) {
#pragma omp parallel for
    for (int64_t panel = place->first / place->width; panel <= (end - 1) / place->width;
         ++panel) {
      const int64_t begin = largest(panel * place->width, place->first);
      for (int64_t i = begin; i < least((panel + 1) * place->width, end); ++i)
        pack_row(*linear, layout, codes, *from, i - place->first, panels + panel * layout.end,
                 place->offset + i % place->width);
    }
  });
}

void octavo_linear_lookup_expanded(const void* arguments) {
  using namespace octavo;
  const auto& call = *static_cast<const OctavoLookupCall*>(arguments);
  const OctavoLinear& linear = *call.linear;
  const int64_t inputs = linear.inputs;
  float* const row = static_cast<float*>(spare_memory(inputs * sizeof(float)));
#pragma omp for schedule(static)
  for (int64_t i = 0; i < *call.rows; ++i) {
    with_codes(linear, expanded_layout(linear).narrow,
               [&](auto codes) { expand_row(linear, codes, call.ids[i], row); });
    if (linear.element == OCTAVO_BF16) {
      put_row(linear, row, static_cast<bf16*>(call.y) + i * inputs);
    } else {
      put_row(linear, row, static_cast<float*>(call.y) + i * inputs);
    }
  }
}
