// Memory of each thread for what it computes on the way.
#pragma once

#include <cstddef>
#include <cstdlib>

namespace octavo {
namespace {  // see numbers.h

// Memory of this thread, aligned to 64 bytes, for as long as it runs: up to some MiB, too much for
// the stack of some threads.
inline void* spare_memory(size_t size) {
  struct Buffer {
    void* at = nullptr;
    size_t size = 0;
    ~Buffer() { std::free(at); }
  };
  static thread_local Buffer buffer;
  if (buffer.size < size) {
    std::free(buffer.at);
    buffer.at = std::aligned_alloc(64, (size + 63) / 64 * 64);
    if (!buffer.at) std::abort();
    buffer.size = size;
  }
  return buffer.at;
}

}  // namespace
}  // namespace octavo
