#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "octavo.h"

namespace {

// Whether the CPU has AMX's tiles, INT8 and BF16, and Linux lets this process use them.
bool may_use_tiles() {
  unsigned eax, ebx, ecx, edx;
  constexpr unsigned kBf16 = 1u << 22, kTile = 1u << 24, kInt8 = 1u << 25;
  constexpr unsigned kAll = kBf16 | kTile | kInt8;
  if (!__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) || (edx & kAll) != kAll) return false;
  constexpr int kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

}  // namespace

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
  constexpr int64_t with_tiles = OCTAVO_AVX512_BF16 | OCTAVO_AVX512_VNNI;
  if ((found & with_tiles) == with_tiles && may_use_tiles()) found |= OCTAVO_AMX;
  return found;
}
