// Weights that are expanded where they are multiplied (OctavoLinear's `coding`): how they lie in
// memory.
//
// A panel is codes; scales [groups][32], FP32 or FP16; minimums, as these, or zeros, uint8
// [groups][32]; with OCTAVO_TABLES tables [32][2^bits]. Codes lie in blocks of 32 inputs by 32
// lanes, in the order of dense weights: element e of a block is where a dense panel of the same
// element type has it. Codes of 8 bits, and FP8, follow one another. Smaller ones are taken out of
// words of 32 bits, a vector of 16 words after the other: word d of vector j holds those of the
// elements 16 (j n + k) + d, k = 0 .. n - 1, from its lowest bits on, where n are the codes of a
// word. So they become vectors of neighbours by a shift each. Of 3 bits the lower two lie so, and
// after those of the block the third ones.
//
// Where numbers are looked up in BF16, as they need no scale then, words have 16 bits; tables of
// lanes are in BF16, too.
#pragma once

#include "linear.h"

namespace octavo {

// Plain numbers: what expands is called across files.
struct ExpandedLayout {
  int64_t groups, block;                         // bytes of a block
  int64_t scale;                                 // bytes of one
  int64_t scales, minimums, zeros, tables, end;  // where in a panel they begin
  bool paired, narrow;                           // for BF16; looked up in BF16
};

// Writes a panel's block `index` as a dense one, of the element type.
using ExpandBlock = void(const OctavoLinear& linear, const ExpandedLayout& layout,
                         const char* panel, int64_t index, void* to);

// What expands a linear's weights to BF16: for the files that multiply those.
ExpandBlock* bf16_expander(const OctavoLinear& linear);

namespace {  // see numbers.h

constexpr int64_t kBlock = 32;                    // inputs
constexpr int64_t kBlockCodes = kBlock * kPanel;  // of 1 bit: 128 bytes

inline ExpandedLayout expanded_layout(const OctavoLinear& linear) {
  ExpandedLayout to;
  to.paired = linear.element == OCTAVO_BF16;
  to.groups = linear.group ? num_groups(linear) : 0;
  to.narrow = to.paired && (!to.groups || linear.scales_sums) &&
              (linear.coding == OCTAVO_TABLE || linear.coding == OCTAVO_TABLES);
  to.block = kBlockCodes * linear.bits / 8;
  to.scale = linear.wide_scales ? sizeof(float) : sizeof(uint16_t);
  const int64_t numbers = to.groups * kPanel;
  to.scales = ceil_div(linear.inputs, kBlock) * to.block;
  to.minimums = to.scales + numbers * to.scale;
  to.zeros = to.minimums + (linear.has_minimums ? numbers * to.scale : 0);
  to.tables = to.zeros + (linear.has_zeros ? ceil_div(numbers, kLine) * kLine : 0);
  to.end = to.tables;
  if (linear.coding == OCTAVO_TABLES)
    to.end += (kPanel << linear.bits) * (to.narrow ? sizeof(bf16) : sizeof(float));
  return to;
}

// Where a dense block has the weight of a lane and an input.
inline int64_t dense_element(bool paired, int64_t lane, int64_t input) {
  return paired ? input / 2 * 2 * kPanel + 2 * lane + input % 2 : input * kPanel + lane;
}

}  // namespace
}  // namespace octavo
