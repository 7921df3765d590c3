#include "shared_collectives.h"

using namespace octavo;

int64_t octavo_shared_bytes(int64_t size, int64_t capacity) {
  return size * (static_cast<int64_t>(sizeof(Counter)) + 2 * capacity);
}

// In rounds of a buffer, which hold the same range of bytes of every rank's x.
void octavo_all_gather(const void* arguments) {
  const auto& call = *static_cast<const OctavoAllGatherCall*>(arguments);
  OctavoShared* const group = call.group;
  const int64_t rows = *call.rows;
  int64_t widest = 0, row_bytes = 0;
  for (int64_t rank = 0; rank < group->size; ++rank) {
    widest = largest(widest, call.widths[rank]);
    row_bytes += call.widths[rank];
  }
  const int64_t own_bytes = rows * call.widths[group->rank];
  for (int64_t first = 0; first < rows * widest; first += group->capacity) {
    const int64_t end = first + group->capacity;
    const char* const x = static_cast<const char*>(call.x) + first;
    const int64_t begun = group->begun;
    copy_bytes(buffer_of(*group, group->rank, begun), x, least(own_bytes, end) - first);
    if (!meet(group)) return;
    int64_t column = 0;
    for (int64_t rank = 0; rank < group->size; column += call.widths[rank++]) {
      const int64_t width = call.widths[rank];
      const char* const from = buffer_of(*group, rank, begun) - first;
#pragma omp for schedule(static) nowait
      for (int64_t row = 0; row < rows; ++row) {
        const int64_t start = largest(row * width, first);
        const int64_t count = least((row + 1) * width, end) - start;
        if (count > 0)
          std::memcpy(static_cast<char*>(call.y) + row * row_bytes + column + start - row * width,
                      from + start, count);
      }
    }
#pragma omp barrier
  }
}

void octavo_broadcast(const void* arguments) {
  const auto& call = *static_cast<const OctavoBroadcastCall*>(arguments);
  OctavoShared* const group = call.group;
  const int64_t bytes = *call.rows * call.row_bytes;
  for (int64_t first = 0; first < bytes; first += group->capacity) {
    char* const x = static_cast<char*>(call.x) + first;
    char* const buffer = buffer_of(*group, call.source, group->begun);
    const int64_t count = least(group->capacity, bytes - first);
    const bool is_source = group->rank == call.source;
    copy_bytes(buffer, x, is_source ? count : 0);
    if (!meet(group)) return;
    copy_bytes(x, buffer, is_source ? 0 : count);
  }
}
