#include "octavo.h"

int64_t octavo_interface() { return OCTAVO_INTERFACE; }

int64_t octavo_features() {
  __builtin_cpu_init();
  int64_t found = 0;
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
      __builtin_cpu_supports("f16c"))
    found |= OCTAVO_AVX2;
  const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  if (avx512) found |= OCTAVO_AVX512;
  if (avx512 && __builtin_cpu_supports("avx512bf16")) found |= OCTAVO_AVX512_BF16;
  if (avx512 && __builtin_cpu_supports("avx512vnni")) found |= OCTAVO_AVX512_VNNI;
  return found;
}
