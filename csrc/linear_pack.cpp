// Packing weights into panels, once, and reading rows of them back.
#pragma GCC target("avx2,fma,f16c")

#include "expanded_layout.h"
#include "linear.h"
#include "linear_scratch.h"
#include "rounding.h"

#include <immintrin.h>

namespace octavo {
namespace {

// Where the code of a lane and an input of a group lies: its byte, and how far up in it. Of 3 bits
// these are the lower two.
struct CodePlace {
  int64_t byte;
  int shift;
  CodePlace(int64_t bits, int64_t lane, int64_t input) {
    const int64_t within = lane % kHalf * 4 + input % 4, half = lane / kHalf;
    if (bits == 8) {
      byte = input / 4 * 128 + lane * 4 + input % 4;
      shift = 0;
    } else if (bits == 4) {
      byte = input / 4 * 64 + within;
      shift = static_cast<int>(half * 4);
    } else {
      byte = input / 16 * 64 * bits + input % 16 / 8 * 64 + within;
      shift = static_cast<int>(input % 8 / 4 * 4 + half * 2);
    }
  }
  // Of the third bit.
  static CodePlace third(int64_t lane, int64_t input) {
    CodePlace place(3, lane, input);
    place.byte = input / 16 * 64 * 3 + 2 * 64 + lane % kHalf * 4 + input % 4;
    place.shift = static_cast<int>(input % 16 / 4 * 2 + lane / kHalf);
    return place;
  }
};
void put_code(char* codes, int64_t bits, int64_t lane, int64_t input, int code) {
  const CodePlace at(bits, lane, input);
  codes[at.byte] |= static_cast<char>((bits == 3 ? code & 3 : code) << at.shift);
  if (bits != 3) return;
  const CodePlace third = CodePlace::third(lane, input);
  codes[third.byte] |= static_cast<char>(code >> 2 << third.shift);
}
int take_code(const char* codes, int64_t bits, int64_t lane, int64_t input) {
  const CodePlace at(bits, lane, input);
  const int mask = bits == 3 ? 3 : (1 << bits) - 1;
  const int code = static_cast<uint8_t>(codes[at.byte]) >> at.shift & mask;
  if (bits != 3) return code;
  const CodePlace third = CodePlace::third(lane, input);
  return code | (static_cast<uint8_t>(codes[third.byte]) >> third.shift & 1) << 2;
}

struct Lane {
  int64_t panel, lane;
  Lane(const OctavoPlace& place, int64_t row)
      : panel((place.first + row) / place.width),
        lane(place.offset + (place.first + row) % place.width) {}
};

template <class T>
void pack(const OctavoLinear& linear, const T* weight, const OctavoPlace& place) {
  constexpr int64_t step = sizeof(T) == 2 ? 2 : 1;
  const int64_t size = dense_panel_bytes(linear) / static_cast<int64_t>(sizeof(T));
  T* const panels = static_cast<T*>(const_cast<void*>(linear.weights));
#pragma omp parallel for
  for (int64_t row = 0; row < place.rows; ++row) {
    const Lane at(place, row);
    const T* from = weight + row * linear.inputs;
    T* to = panels + at.panel * size + step * at.lane;
    for (int64_t i = 0; i < linear.inputs; ++i) to[i / step * step * kPanel + i % step] = from[i];
  }
}

float read_scale(const OctavoLinear& linear, const char* scales, int64_t lane) {
  if (linear.wide_scales) return reinterpret_cast<const float*>(scales)[lane];
  return _cvtsh_ss(reinterpret_cast<const uint16_t*>(scales)[lane]);
}

template <class T>
void look_up(const OctavoLinear& linear, int64_t id, T* y) {
  const CodeLayout layout(linear);
  const int64_t groups = num_groups(linear), lane = id % kPanel;
  const char* block =
      static_cast<const char*>(linear.weights) + id / kPanel * groups * layout.group;
  for (int64_t g = 0; g < groups; ++g, block += layout.group) {
    const float scale = read_scale(linear, block, lane);
    const float minimum =
        linear.has_minimums ? read_scale(linear, block + layout.scales, lane) : 0.0f;
    const int zero = static_cast<int>(linear.zero) +
                     (linear.has_zeros ? static_cast<int8_t>(block[layout.scales + lane]) : 0);
    const int64_t first = g * linear.group, count = least(linear.group, linear.inputs - first);
    for (int64_t i = 0; i < count; ++i) {
      const int code = take_code(block + layout.header, linear.bits, lane, i);
      y[linear.order ? linear.order[first + i] : first + i] =
          from_float<T>(static_cast<float>(code - zero) * scale + minimum);
    }
  }
}

template <class T>
void quantize(const OctavoQuantize& call, const T* weight) {
  const int64_t inputs = call.inputs, groups = ceil_div(inputs, call.group);
#pragma omp parallel for
  for (int64_t row = 0; row < call.rows; ++row) {
    for (int64_t g = 0; g < groups; ++g) {
      const int64_t first = g * call.group, count = least(call.group, inputs - first);
      const T* const from = weight + row * inputs + first;
      uint8_t* const codes = call.codes + row * inputs + first;
      const float largest = largest_of(from, count);
      round_to(reinterpret_cast<int8_t*>(codes), from, count, levels_per(largest));
      for (int64_t i = 0; i < count; ++i) codes[i] ^= 128;  // from signed to 0 .. 255
      call.scales[row * groups + g] = largest / kLevels;
    }
  }
}

}  // namespace
}  // namespace octavo

void octavo_quantize(const OctavoQuantize* arguments) {
  if (arguments->element == OCTAVO_BF16) {
    octavo::quantize(*arguments, static_cast<const octavo::bf16*>(arguments->weight));
  } else {
    octavo::quantize(*arguments, static_cast<const float*>(arguments->weight));
  }
}

int64_t octavo_linear_bytes(const OctavoLinear* linear) {
  using namespace octavo;
  if (linear->coding) return num_panels(*linear) * expanded_layout(*linear).end;
  if (linear->bits)
    return num_panels(*linear) * num_groups(*linear) * CodeLayout(*linear).group;
  return num_panels(*linear) * dense_panel_bytes(*linear);
}

int64_t octavo_linear_scratch(const OctavoLinear* linear, int64_t rows) {
  using namespace octavo;
  if (linear->bits && !linear->coding)
    return largest(RoundedLayout::bytes(*linear, rows), TileLayout::bytes(*linear, rows));
  if (linear->element == OCTAVO_F32)
    return rows_conflict(*linear) || linear->order
               ? rows * (linear->inputs * element_size(*linear) + kApart)
               : 0;
  return (copies_all_rows(*linear) ? ceil_div(rows, kTileRows) : 1) * kTileRows *
         copied_row_bytes(*linear);
}

void octavo_linear_pack(const OctavoLinear* linear, const void* weight, const OctavoPlace* place) {
  if (linear->element == OCTAVO_BF16) {
    octavo::pack(*linear, static_cast<const octavo::bf16*>(weight), *place);
  } else {
    octavo::pack(*linear, static_cast<const float*>(weight), *place);
  }
}

void octavo_linear_pack_codes(const OctavoLinear* linear, const uint8_t* codes, const void* scales,
                              const void* minimums, const int8_t* zeros,
                              const OctavoPlace* place) {
  using namespace octavo;
  const CodeLayout layout(*linear);
  const int64_t groups = num_groups(*linear), size = layout.scales / kPanel;
  char* const panels = static_cast<char*>(const_cast<void*>(linear->weights));
  const int64_t first_panel = place->first / place->width;
  const int64_t end_panel = ceil_div(place->first + place->rows, place->width);
#pragma omp parallel for
  for (int64_t panel = first_panel; panel < end_panel; ++panel) {  // rows that share bytes
    const int64_t begin = panel * place->width - place->first;
    for (int64_t row = largest(begin, 0); row < least(begin + place->width, place->rows); ++row) {
      const int64_t lane = Lane(*place, row).lane;
      char* block = panels + panel * groups * layout.group;
      for (int64_t g = 0; g < groups; ++g, block += layout.group) {
        const int64_t from = (row * groups + g) * size;
        std::memcpy(block + lane * size, static_cast<const char*>(scales) + from, size);
        if (minimums)
          std::memcpy(block + (kPanel + lane) * size, static_cast<const char*>(minimums) + from,
                      size);
        if (zeros)
          block[layout.scales + lane] = static_cast<char>(zeros[row * groups + g]);
        const int64_t first = g * linear->group;
        for (int64_t i = 0; i < least(linear->group, linear->inputs - first); ++i)
          put_code(block + layout.header, linear->bits, lane, i,
                   codes[row * linear->inputs + first + i]);
      }
    }
  }
}

void octavo_linear_lookup(const void* arguments) {
  const auto& call = *static_cast<const OctavoLookupCall*>(arguments);
  const int64_t inputs = call.linear->inputs;
#pragma omp for schedule(static)
  for (int64_t i = 0; i < *call.rows; ++i) {
    if (call.linear->element == OCTAVO_BF16) {
      octavo::look_up(*call.linear, call.ids[i], static_cast<octavo::bf16*>(call.y) + i * inputs);
    } else {
      octavo::look_up(*call.linear, call.ids[i], static_cast<float*>(call.y) + i * inputs);
    }
  }
}
