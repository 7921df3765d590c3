// How a step's attention is cut into tasks.
#include "attention_layout.h"

#include <omp.h>

#include <algorithm>

namespace octavo {
namespace {

// Fewer tasks than this for each thread, and contexts are split: one thread must not be left with
// the longest.
constexpr int64_t kEnoughTasks = 4;

class Plan {
 public:
  explicit Plan(OctavoAttention& step)
      : step_(step), tasks_(static_cast<Task*>(step.tasks)) {
    step.num_tasks = step.num_merges = step.num_slots = 0;
  }

  // Calls `visit` with each run of rows as one task of all its pieces.
  template <class Visit>
  void each_run(const Visit& visit) const {
    for (int64_t row = 0; row < step_.num_rows; ++row) {
      const Context context(step_, row);
      const int64_t queries = step_.query_starts[row + 1] - step_.query_starts[row];
      for (int64_t first = 0; first < queries * context.group; first += kTaskRows) {
        const int64_t count = least(kTaskRows, queries * context.group - first);
        const int64_t low = context.low(first), high = context.high(first + count - 1);
        Task task{};
        task.row = static_cast<int32_t>(row);
        task.first_row = static_cast<int32_t>(first);
        task.num_rows = static_cast<int32_t>(count);
        task.first_piece = static_cast<int32_t>(low / kPiece);
        task.end_piece = static_cast<int32_t>(ceil_div(high, kPiece));
        task.slot = -1;
        task.cost = static_cast<float>(count * (high - low));
        for (task.head = 0; task.head < step_.num_kv_heads; ++task.head) visit(task);
      }
    }
  }

  void fill() {
    int64_t runs = 0;
    each_run([&](const Task&) { ++runs; });
    const int64_t threads = omp_get_max_threads();
    split_ = threads > 1 && runs < kEnoughTasks * threads;
    each_run([&](const Task& run) {
      const bool split = is_split(run);
      step_.num_tasks += split ? num_pieces(run) : 1;
      step_.num_merges += split;
      step_.num_slots += split ? num_pieces(run) * run.num_rows : 0;
    });
    if (step_.num_tasks + step_.num_merges > step_.capacity) return;
    Task* task = tasks_;
    Task* merge = tasks_ + step_.num_tasks;
    int32_t slot = 0;
    each_run([&](Task run) {
      if (!is_split(run)) {
        *task++ = run;
        return;
      }
      run.slot = slot;
      *merge++ = run;
      run.cost /= static_cast<float>(num_pieces(run));
      for (const int32_t end = run.end_piece; run.first_piece < end; ++run.first_piece) {
        run.end_piece = run.first_piece + 1;
        run.slot = slot;
        slot += run.num_rows;
        *task++ = run;
      }
    });
    std::stable_sort(tasks_, task, [](const Task& a, const Task& b) { return a.cost > b.cost; });
  }

 private:
  static int64_t num_pieces(const Task& run) { return run.end_piece - run.first_piece; }
  bool is_split(const Task& run) const { return split_ && num_pieces(run) > 1; }

  OctavoAttention& step_;
  Task* tasks_;
  bool split_ = false;  // runs of several pieces become a task for each
};

}  // namespace
}  // namespace octavo

void octavo_attention_plan(OctavoAttention* step) { octavo::Plan(*step).fill(); }
