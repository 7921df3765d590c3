#pragma GCC target("avx2,fma,f16c")

#include <immintrin.h>

#include "shared_collectives.h"

namespace octavo {
namespace {  // see numbers.h

struct f16 {
  uint16_t bits;
};

inline float to_float(f16 x) { return _cvtsh_ss(x.bits); }

template <>
inline f16 from_float<f16>(float x) {
  return f16{_cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT)};
}

// What numbers are summed in: FP32, or their own type where that is no narrower.
template <class T>
struct Sum {
  using Type = float;
  static float load(T x) { return to_float(x); }
  static T store(float x) { return from_float<T>(x); }
};
template <class T>
struct OwnSum {
  using Type = T;
  static T load(T x) { return x; }
  static T store(T x) { return x; }
};
template <>
struct Sum<double> : OwnSum<double> {};
template <>
struct Sum<uint32_t> : OwnSum<uint32_t> {};  // of whole numbers sums go round, signed or not
template <>
struct Sum<uint64_t> : OwnSum<uint64_t> {};

// Of every rank a range of its numbers: the others' in their buffers, one's own where it is.
template <class T>
struct Parts {
  const char* buffers;  // of rank 0
  int64_t stride;       // bytes from a rank's to the next
  const T* own;
  int64_t rank, size;

  const T* of(int64_t index) const {
    return index == rank ? own : reinterpret_cast<const T*>(buffers + index * stride);
  }
};

// to = the sum of the parts, from `first` on; `to` may be one's own.
template <class T>
void sum_some(T* to, const Parts<T>& parts, int64_t first, int64_t count) {
  constexpr int64_t kAtATime = 256;
  typename Sum<T>::Type sums[kAtATime];
  const T* part = parts.of(0) + first;
  for (int64_t i = 0; i < count; ++i) sums[i] = Sum<T>::load(part[i]);
  for (int64_t rank = 1; rank < parts.size; ++rank) {
    part = parts.of(rank) + first;
    for (int64_t i = 0; i < count; ++i) sums[i] += Sum<T>::load(part[i]);
  }
  for (int64_t i = 0; i < count; ++i) to[i] = Sum<T>::store(sums[i]);
}

// to[0] is the sum of the parts' number `range.first`. By all threads of a team.
template <class T>
void sum_range(T* to, const Parts<T>& parts, Span range) {
  constexpr int64_t kAtATime = 256;
#pragma omp for schedule(static)
  for (int64_t i = range.first; i < range.end(); i += kAtATime)
    sum_some(to + i - range.first, parts, i, least(kAtATime, range.end() - i));
}

template <class T>
Parts<T> parts_of(const OctavoShared& group, const T* own) {
  return {buffer_of(group, 0, group.begun), 2 * group.capacity, own, group.rank, group.size};
}

// Everybody sums everything: one exchange.
template <class T>
void sum_at_once(OctavoShared* group, T* x, int64_t count) {
  const Parts<T> parts = parts_of(*group, x);
  copy_bytes(buffer_of(*group, group->rank, group->begun), x, count * sizeof(T));
  if (meet(group)) sum_range(x, parts, {0, count});
}

// Each rank sums its part, which the others then read: two exchanges, less to read and to add.
template <class T>
void sum_in_parts(OctavoShared* group, T* x, int64_t count) {
  const Parts<T> parts = parts_of(*group, x);
  const Span own = part_of(count, group->rank, group->size);
  const int64_t begun = group->begun;
  char* const buffer = buffer_of(*group, group->rank, begun);
  copy_bytes(buffer, x, own.first * sizeof(T));
  copy_bytes(buffer + own.end() * sizeof(T), x + own.end(), (count - own.end()) * sizeof(T));
  if (!meet(group)) return;
  T* const sums = reinterpret_cast<T*>(buffer_of(*group, group->rank, begun + 1));
  sum_range(sums, parts, own);
  if (!meet(group)) return;
  for (int64_t rank = 0; rank < group->size; ++rank) {
    const Span part = part_of(count, rank, group->size);
    copy_bytes(x + part.first, buffer_of(*group, rank, begun + 1),
               part.count * sizeof(T));
  }
}

// Bytes up to which the second exchange would take longer than it spares.
constexpr int64_t kAtOnce = 65536;

template <class T>
void all_reduce(const OctavoAllReduceCall& call) {
  const int64_t count = *call.rows * call.width, most = call.group->capacity / sizeof(T);
  for (int64_t first = 0; first < count && !call.group->failure; first += most) {
    T* const x = static_cast<T*>(call.x) + first;
    const int64_t some = least(most, count - first);
    const bool at_once = some * static_cast<int64_t>(sizeof(T)) <= kAtOnce;
    at_once ? sum_at_once(call.group, x, some) : sum_in_parts(call.group, x, some);
  }
}

}  // namespace
}  // namespace octavo

void octavo_all_reduce_avx2(const void* arguments) {
  const auto& call = *static_cast<const OctavoAllReduceCall*>(arguments);
  switch (call.element) {
    case OCTAVO_F32: return octavo::all_reduce<float>(call);
    case OCTAVO_BF16: return octavo::all_reduce<octavo::bf16>(call);
    case OCTAVO_F16: return octavo::all_reduce<octavo::f16>(call);
    case OCTAVO_F64: return octavo::all_reduce<double>(call);
    case OCTAVO_I32: return octavo::all_reduce<uint32_t>(call);
    case OCTAVO_I64: return octavo::all_reduce<uint64_t>(call);
  }
}
