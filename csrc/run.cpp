// Kernels in one team of threads, and those that are the same for every instruction set.
#include <cstring>

#include "octavo.h"

void octavo_run(const OctavoCall* calls, int64_t count) {
#pragma omp parallel
  for (int64_t i = 0; i < count; ++i) calls[i].kernel(calls[i].arguments);
}

void octavo_take_rows(const void* arguments) {
  const auto& call = *static_cast<const OctavoTakeCall*>(arguments);
  const char* const x = static_cast<const char*>(call.x);
  char* const y = static_cast<char*>(call.y);
#pragma omp for schedule(static)
  for (int64_t i = 0; i < *call.rows; ++i)
    std::memcpy(y + i * call.row_bytes, x + call.index[i] * call.row_bytes, call.row_bytes);
}
