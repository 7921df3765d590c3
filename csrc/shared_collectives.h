// What ranks of one host exchange through memory that all of them have mapped.
//
// Each rank has a counter and two buffers there. An exchange is: write into one's own buffer, raise
// one's counter, wait until all counters are as high, read the others' buffers. Exchange after
// exchange takes the two buffers in turns: whoever writes into one of them has seen all others begin
// the exchange after its last use, so they have read it.
#pragma once

#include <linux/futex.h>
#include <poll.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <climits>
#include <cstring>

#include "numbers.h"
#include "octavo.h"

namespace octavo {
namespace {  // see numbers.h

constexpr int64_t kNanos = 1000000000;
constexpr int64_t kYieldFor = 100000;     // ns that the core is offered to others in between
constexpr int64_t kSleepFor = 100000000;  // ns of sleep between two looks at a process
constexpr int kLooks = 16;                // at a counter between two looks at the clock

// Of one rank, in the shared memory, on a cache line of its own.
struct alignas(64) Counter {
  std::atomic<uint32_t> begun;
  std::atomic<uint32_t> sleepers;  // that wait for it
};
static_assert(std::atomic<uint32_t>::is_always_lock_free, "shared between processes");

inline int64_t now() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return time.tv_sec * kNanos + time.tv_nsec;
}

inline void futex(std::atomic<uint32_t>* word, int operation, uint32_t value, const timespec* time) {
  syscall(SYS_futex, word, operation, value, time, nullptr, 0);
}

inline bool has_ended(int32_t pidfd) {
  pollfd file{pidfd, POLLIN, 0};
  return pidfd >= 0 && poll(&file, 1, 0) == 1 && (file.revents & POLLIN);
}

inline Counter* counter_of(const OctavoShared& group, int64_t rank) {
  return static_cast<Counter*>(group.memory) + rank;
}

// In the exchange after `begun` ones.
inline char* buffer_of(const OctavoShared& group, int64_t rank, int64_t begun) {
  char* const first = static_cast<char*>(group.memory) + group.size * sizeof(Counter);
  return first + (2 * rank + begun % 2) * group.capacity;
}

inline bool has_begun(const Counter& counter, uint32_t exchange, uint32_t* seen) {
  *seen = counter.begun.load(std::memory_order_acquire);
  return static_cast<int32_t>(*seen - exchange) >= 0;
}

// Sleeps until another thread raises the counter, for kSleepFor at most.
inline void sleep_for(Counter* counter, uint32_t seen) {
  const timespec time{0, kSleepFor};
  counter->sleepers.fetch_add(1);
  if (counter->begun.load() == seen) futex(&counter->begun, FUTEX_WAIT, seen, &time);
  counter->sleepers.fetch_sub(1);
}

// Until the rank has begun the exchange. Spins where the group has cores enough, then lets others
// have the core, then sleeps. Sets `failure` where its process has ended or it does not come.
inline void wait_for(OctavoShared* group, int64_t rank, uint32_t exchange) {
  Counter* const counter = counter_of(*group, rank);
  uint32_t seen;
  if (has_begun(*counter, exchange, &seen)) return;
  const int64_t began = now();
  for (int64_t waited = 0; waited < group->spin; waited = now() - began) {
    for (int look = 0; look < kLooks; ++look) {
      if (has_begun(*counter, exchange, &seen)) return;
      __builtin_ia32_pause();
    }
  }
  while (now() - began < kYieldFor) {
    if (has_begun(*counter, exchange, &seen)) return;
    sched_yield();
  }
  while (!has_begun(*counter, exchange, &seen)) {
    sleep_for(counter, seen);
    const bool ended = has_ended(group->processes[rank]);
    if (has_begun(*counter, exchange, &seen)) return;  // it may have been its last
    if (!ended && now() - began < group->timeout) continue;
    group->failed_rank = rank;
    group->failure = ended ? OCTAVO_ENDED : OCTAVO_LATE;
    return;
  }
}

// Raises this rank's counter and waits for the others': their buffers can be read then. By all
// threads of a team, after a barrier behind which none of them looks at `begun`. Returns whether all
// have come; where one has not, nothing is exchanged any more.
inline bool meet(OctavoShared* group) {
#pragma omp single
  if (!group->failure) {
    const auto exchange = static_cast<uint32_t>(++group->begun);
    Counter* const own = counter_of(*group, group->rank);
    own->begun.store(exchange);  // in one order with the sleepers' own
    if (own->sleepers.load()) futex(&own->begun, FUTEX_WAKE, INT_MAX, nullptr);
    for (int64_t rank = 0; rank < group->size && !group->failure; ++rank)
      if (rank != group->rank) wait_for(group, rank, exchange);
  }
  return !group->failure;
}

struct Span {
  int64_t first, count;
  int64_t end() const { return first + count; }
};

// Part `index` of `parts` of `count` things, whole units of 64 but for the last.
inline Span part_of(int64_t count, int64_t index, int64_t parts) {
  const int64_t each = ceil_div(ceil_div(count, parts), 64) * 64;
  const int64_t first = least(count, index * each);
  return {first, least(count - first, each)};
}

// By all threads of a team, with a barrier behind it even where there is nothing to copy.
inline void copy_bytes(void* to, const void* from, int64_t count) {
  constexpr int64_t kPiece = 16384;
#pragma omp for schedule(static)
  for (int64_t i = 0; i < count; i += kPiece)
    std::memcpy(static_cast<char*>(to) + i, static_cast<const char*>(from) + i,
                least(kPiece, count - i));
}

}  // namespace
}  // namespace octavo
