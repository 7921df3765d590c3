// The tiles of tiles.h in plain C++, slow: so that tests of what uses them run on every machine.
// Written after the pseudocode of Intel's Software Developer's Manual (TDPBF16PS, TDPBSSD).
#pragma once

#include <cmath>
#include <cstring>

#include "numbers.h"
#include "tiles.h"

namespace octavo {
namespace {  // see numbers.h

struct EmulatedTiles {
  class Session {
   public:
    explicit Session(const TileShapes& given) { shapes() = given; }
  };

  template <int TILE>
  static void zero() {
    std::memset(tile(TILE), 0, sizeof(Tile));
  }
  template <int TILE>
  static void load(const void* from, int64_t stride) {
    zero<TILE>();
    for (int row = 0; row < shapes().rows[TILE]; ++row)
      std::memcpy(tile(TILE)[row], static_cast<const char*>(from) + row * stride,
                  shapes().row_bytes[TILE]);
  }
  template <int TILE>
  static void store(void* to, int64_t stride) {
    for (int row = 0; row < 16; ++row)
      std::memcpy(static_cast<char*>(to) + row * stride, tile(TILE)[row], 64);
  }
  template <int SUMS, int INPUTS, int WEIGHTS>
  static void dot_pairs() {
    for (int row = 0; row < 16; ++row) {
      for (int lane = 0; lane < 16; ++lane) {
        float parts[2] = {};
        for (int word = 0; word < shapes().row_bytes[INPUTS] / 4; ++word)
          for (int i = 0; i < 2; ++i)
            parts[i] = std::fma(element<bf16>(INPUTS, row, word, i),
                                element<bf16>(WEIGHTS, word, lane, i), parts[i]);
        add<SUMS>(row, lane, parts[0] + parts[1]);
      }
    }
  }
  template <int SUMS, int INPUTS, int WEIGHTS>
  static void dot_bytes() {
    for (int row = 0; row < 16; ++row) {
      for (int lane = 0; lane < 16; ++lane) {
        int32_t sum = 0;
        for (int word = 0; word < shapes().row_bytes[INPUTS] / 4; ++word)
          for (int i = 0; i < 4; ++i)
            sum += static_cast<int8_t>(tile(INPUTS)[row][4 * word + i]) *
                   static_cast<int8_t>(tile(WEIGHTS)[word][4 * lane + i]);
        add<SUMS>(row, lane, sum);
      }
    }
  }

 private:
  using Tile = uint8_t[16][64];

  static uint8_t (*tile(int i))[64] {
    alignas(64) static thread_local Tile tiles[8];
    return tiles[i];
  }
  static TileShapes& shapes() {
    static thread_local TileShapes kept;
    return kept;
  }
  template <class T>
  static float element(int i, int row, int word, int at) {
    T number;
    std::memcpy(&number, &tile(i)[row][4 * word + static_cast<int>(sizeof(T)) * at], sizeof(T));
    return to_float(number);
  }
  template <int SUMS, class T>
  static void add(int row, int lane, T more) {
    T sum;
    std::memcpy(&sum, &tile(SUMS)[row][4 * lane], sizeof sum);
    sum += more;
    std::memcpy(&tile(SUMS)[row][4 * lane], &sum, sizeof sum);
  }
};

}  // namespace
}  // namespace octavo
