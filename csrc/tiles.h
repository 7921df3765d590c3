// Tiles of AMX: registers of 16 rows of up to 64 bytes, multiplied with each other.
//
// Not the compiler's intrinsics: those of GCC 12 do not say what memory they read.
//
// A product adds to sums, [16][16] of 32 bits, rows of inputs, [16][bytes], times weights,
// [bytes / 4][16 lanes][4 bytes].
#pragma once

#include <cstdint>

namespace octavo {
namespace {  // see numbers.h

struct alignas(64) TileShapes {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};

  // All are of 16 rows of 64 bytes but for those of `inputs` and `weights`, which multiply `bytes`
  // of a row, a multiple of 4 up to 64.
  TileShapes() {
    for (int tile = 0; tile < 8; ++tile) {
      row_bytes[tile] = 64;
      rows[tile] = 16;
    }
  }
  TileShapes(int inputs, int weights, int64_t bytes) : TileShapes() {
    row_bytes[inputs] = static_cast<uint16_t>(bytes);
    rows[weights] = static_cast<uint8_t>(bytes / 4);
  }
};

struct Tiles {
  // The thread's tiles have these shapes for as long as this lives.
  class Session {
   public:
    explicit Session(const TileShapes& shapes) {
      asm volatile("ldtilecfg %0" : : "m"(shapes) : "memory");
    }
    ~Session() { asm volatile("tilerelease" : : : "memory"); }
    Session(const Session&) = delete;
    Session& operator=(const Session&) = delete;
  };

  template <int TILE>
  static void zero() {
    asm volatile("tilezero %%tmm%c0" : : "i"(TILE) : "memory");
  }
  // stride: bytes between rows in memory.
  template <int TILE>
  static void load(const void* from, int64_t stride) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(from), "r"(stride), "i"(TILE) : "memory");
  }
  template <int TILE>
  static void store(void* to, int64_t stride) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(to), "r"(stride), "i"(TILE) : "memory");
  }
  // sums += pairs of BF16, in FP32: first those of even inputs and those of odd ones, each in
  // ascending order from 0, then the sum of both is added. Denormals count as zero.
  template <int SUMS, int INPUTS, int WEIGHTS>
  static void dot_pairs() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0"
                 : : "i"(SUMS), "i"(INPUTS), "i"(WEIGHTS) : "memory");
  }
  // sums += signed inputs times signed weights, of 8 bits, in int32.
  template <int SUMS, int INPUTS, int WEIGHTS>
  static void dot_bytes() {
    asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0"
                 : : "i"(SUMS), "i"(INPUTS), "i"(WEIGHTS) : "memory");
  }
};

}  // namespace
}  // namespace octavo
