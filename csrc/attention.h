// Paged attention, for any instruction set: normalisation and rotation of queries and keys, the
// writing of the cache, attention. What an instruction set brings is a class `Isa` (see
// vectors_avx512.h): its vectors, and products of a cache's elements (elements.h).
//
// attention_layout.h: how things lie; attention_tokens.h: new tokens; attention_panel.h: the
// arithmetic of some rows and keys; here: who computes what.
#pragma once

#include <cstring>

#include "attention_panel.h"
#include "attention_rounded.h"
#include "attention_tokens.h"

namespace octavo {
namespace {  // see numbers.h

// The rows of a task and what is summed for them, on the stack of the thread.
template <class Isa>
struct Work {
  using Element = typename Isa::Element;
  alignas(64) float scores[Isa::kPanelRows * kScoreRow];
  alignas(64) float sums[kTaskRows * kMaxDim];
  alignas(64) uint32_t queries[(kTaskRows + kLanes) * kMaxDim / Isa::kStep];  // whole panels
  Panel panels[kTaskRows / Isa::kPanelRows];
  int num_panels;

  // Cuts the task's rows into panels of like size; nothing is summed yet.
  void start(const Layer<Isa>& layer, const Task& task) {
    num_panels = static_cast<int>(ceil_div(task.num_rows, Isa::kPanelRows));
    for (int i = 0; i < num_panels; ++i) {
      const int64_t from = i * task.num_rows / num_panels;
      Panel& panel = panels[i];
      panel.num_rows = static_cast<int>((i + 1) * task.num_rows / num_panels - from);
      panel.sums = sums + from * layer.width();
      panel.queries = queries + from * layer.dim() / Isa::kStep;
      for (int r = 0; r < kLanes; ++r) {
        panel.maximum[r] = kLowest;
        panel.total[r] = 0;
      }
    }
    std::memset(sums, 0, sizeof(float) * task.num_rows * layer.width());
  }

  void load_queries(const Layer<Isa>& layer, const Task& task) {
    const Context context(layer.step, task.row);
    const int64_t dim = layer.dim();
    int64_t row = task.first_row;
    for (int i = 0; i < num_panels; ++i) {
      Panel& panel = panels[i];
      uint32_t* const target = queries + (panel.queries - queries);
      for (int r = 0; r < panel.num_rows; ++r, ++row) {
        panel.low[r] = context.low(row);
        panel.high[r] = context.high(row);
        const int64_t token = layer.step.query_starts[task.row] + row / context.group;
        const int64_t head = task.head * context.group + row % context.group;
        const Element* const query = layer.qkv + token * layer.token_width() + head * dim;
        Attend<Isa>::enter_query(query, dim, panel.num_rows, r, target);
      }
    }
  }
};

// `spare`: where tiles of a cache of 8 bits are expanded, kPieceTiles of keys, then of values.
template <class Isa>
void find_tiles(const Layer<Isa>& layer, const Task& task, int64_t index, int64_t end_place,
                typename Isa::Element* spare, Piece<Isa>& piece) {
  using Element = typename Isa::Element;
  const int64_t block_tiles = layer.block_tiles(), uneven = layer.step.block_size % kTile;
  const int64_t size = layer.tile_elements();
  const int32_t* const table = layer.step.block_tables + task.row * layer.step.table_width;
  piece.base = index * kPiece;
  const int64_t first = index * kPieceTiles;
  const int64_t count = least(kPieceTiles, ceil_div(end_place, kTile) - first);
  const int64_t low = Context(layer.step, task.row).low(task.first_row);
  const auto tile = [&](int64_t i, int kind) -> const char* {
    return layer.tile(table[(first + i) / block_tiles], task.head, kind, (first + i) % block_tiles);
  };
  for (int64_t i = largest(0, low / kTile - first); i < count; ++i) {
    const char* const found[] = {tile(i, 0), tile(i, 1)};
    piece.lanes[i] =
        static_cast<int32_t>(uneven && (first + i) % block_tiles == block_tiles - 1 ? uneven : kTile);
    if (layer.step.kept) {
      Element* const keys = spare + i * size;
      Element* const values = keys + kPieceTiles * size;
      for (int kind = 0; i + 1 < count && kind < 2; ++kind) {
        const char* const next = tile(i + 1, kind);
        for (int64_t at = 0; at < layer.tile_bytes(); at += 64) __builtin_prefetch(next + at, 0, 3);
      }
      expand_tiles<Isa>(layer, found, keys, values);
      piece.keys[i] = keys;
      piece.values[i] = values;
    } else {
      piece.keys[i] = reinterpret_cast<const Element*>(found[0]);
      piece.values[i] = reinterpret_cast<const Element*>(found[1]);
    }
  }
}

// The finished rows of a panel; `row`: that of the task's matrix where it starts.
template <class Isa>
void finish_panel(const Layer<Isa>& layer, const Task& task, int64_t row, Panel& panel) {
  const OctavoAttention& step = layer.step;
  const int64_t dim = layer.dim(), width = layer.width();
  const int64_t group = step.num_heads / step.num_kv_heads;
  alignas(64) float keep[kLanes], take[kLanes], sink[kLanes], one[kLanes];
  for (int r = 0; r < kLanes; ++r) {
    keep[r] = one[r] = 1;
    sink[r] = kLowest;
  }
  if (layer.sinks) {
    for (int r = 0; r < panel.num_rows; ++r) {
      sink[r] = layer.sinks[task.head * group + (row + r) % group] * kLog2e;
    }
    merge_totals<Isa>(panel.maximum, panel.total, sink, one, keep, take);
  }
  for (int r = 0; r < panel.num_rows; ++r) {
    const int64_t token = step.query_starts[task.row] + (row + r) / group;
    const int64_t head = task.head * group + (row + r) % group;
    const float scale = keep[r] / panel.total[r] * layer.kept_scale(task.head, 1);
    auto* const target = layer.out + (token * step.num_heads + head) * dim;
    narrow<Isa>(panel.sums + r * width, scale, dim, target);
  }
}

template <class Isa>
void finish(const Layer<Isa>& layer, const Task& task, Work<Isa>& work) {
  int64_t row = task.first_row;
  for (int i = 0; i < work.num_panels; ++i) {
    finish_panel<Isa>(layer, task, row, work.panels[i]);
    row += work.panels[i].num_rows;
  }
}

template <class Isa>
void attend(const Layer<Isa>& layer, const Task& task) {
  Work<Isa> work;
  Piece<Isa> piece;
  work.start(layer, task);
  work.load_queries(layer, task);
  const Panel& last = work.panels[work.num_panels - 1];
  const int64_t end_place = last.high[last.num_rows - 1];
  using Element = typename Isa::Element;
  Element* spare = nullptr;
  piece.scale = layer.step.scale * layer.kept_scale(task.head, 0);
  if (layer.step.kept) {
    const int64_t elements = 2 * kPieceTiles * layer.tile_elements();
    spare = static_cast<Element*>(spare_memory(elements * sizeof(Element)));
  }
  for (int64_t index = task.first_piece; index < task.end_piece; ++index) {
    find_tiles<Isa>(layer, task, index, end_place, spare, piece);
    for (int i = 0; i < work.num_panels; ++i) {
      piece.is_fresh = i == 0 && !spare;
      Attend<Isa>::panel(layer, piece, work.panels[i], work.scores);
    }
  }
  if (task.slot < 0) {
    finish<Isa>(layer, task, work);
    return;
  }
  float* slot = layer.step.partials + task.slot * layer.slot_floats();
  for (int i = 0; i < work.num_panels; ++i) {
    const Panel& panel = work.panels[i];
    for (int r = 0; r < panel.num_rows; ++r, slot += layer.slot_floats()) {
      std::memcpy(slot, panel.sums + r * layer.width(), sizeof(float) * layer.width());
      slot[layer.width()] = panel.maximum[r];
      slot[layer.width() + 1] = panel.total[r];
    }
  }
}

// Merges what tasks of one piece each have left in slots, in order.
template <class Isa>
void merge(const Layer<Isa>& layer, const Task& task) {
  Work<Isa> work;
  work.start(layer, task);
  const int64_t width = layer.width();
  const float* slot = layer.step.partials + task.slot * layer.slot_floats();
  alignas(64) float maximum[kLanes] = {}, total[kLanes] = {}, keep[kLanes], take[kLanes];
  for (int64_t index = task.first_piece; index < task.end_piece; ++index) {
    for (int i = 0; i < work.num_panels; ++i) {
      Panel& panel = work.panels[i];
      for (int r = 0; r < panel.num_rows; ++r) {
        maximum[r] = slot[r * layer.slot_floats() + width];
        total[r] = slot[r * layer.slot_floats() + width + 1];
      }
      merge_totals<Isa>(panel.maximum, panel.total, maximum, total, keep, take);
      for (int r = 0; r < panel.num_rows; ++r, slot += layer.slot_floats()) {
        for (int64_t j = 0; j < width; j += Isa::kWidth) {
          float* const target = panel.sums + r * width + j;
          const auto kept = Isa::mul(Isa::load(target), Isa::set(keep[r]));
          Isa::store(target, Isa::fma(Isa::load(slot + j), Isa::set(take[r]), kept));
        }
      }
    }
  }
  finish<Isa>(layer, task, work);
}

// `Isa` with tiles: within a session of theirs.
template <class Isa>
void attention(const void* arguments) {
  using Element = typename Isa::Element;
  const auto& call = *static_cast<const OctavoAttentionCall*>(arguments);
  const OctavoAttention& step = *call.step;
  const Layer<Isa> layer{step,
                         static_cast<Element*>(call.qkv),
                         static_cast<char*>(call.cache),
                         static_cast<const Element*>(call.qk_weight),
                         call.sinks,
                         call.kv_scales,
                         static_cast<Element*>(call.out)};
  const Task* const tasks = static_cast<const Task*>(step.tasks);
  const Task* const merges = tasks + step.num_tasks;
#pragma omp for schedule(static)
  for (int64_t token = 0; token < step.num_tokens; ++token) enter_token<Isa>(layer, token);
#pragma omp for schedule(dynamic, 1)
  for (int64_t i = 0; i < step.num_tasks; ++i) attend<Isa>(layer, tasks[i]);
  if (step.num_merges == 0) return;
#pragma omp for schedule(dynamic, 1)
  for (int64_t i = 0; i < step.num_merges; ++i) merge<Isa>(layer, merges[i]);
}

}  // namespace
}  // namespace octavo
