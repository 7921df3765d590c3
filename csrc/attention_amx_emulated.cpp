// The attention of attention_amx.cpp without AMX, for tests.
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma")

#include "attention_tiles.h"
#include "attention.h"
#include "tiles_emulated.h"
#include "vectors_avx512bf16.h"

void octavo_attention_bf16_amx_emulated(const void* arguments) {
  using Isa = octavo::WithTiles<octavo::Avx512Bf16, octavo::EmulatedTiles>;
  const Isa::Tiles::Session session(Isa::shapes());
  octavo::attention<Isa>(arguments);
}
