// The C interface of octavo's CPU kernels.
//
// Plain functions on addresses, called through ctypes with the GIL released. Shapes are row-major;
// BF16 numbers are uint16_t. Nothing is allocated that outlives a call. Each instruction set is a
// source file of its own that begins by naming its target, so that one build serves every x86-64
// machine; the caller asks octavo_features() which of them may run.
#pragma once

#include <cstdint>

#include "numbers.h"

#define OCTAVO_API extern "C" __attribute__((visibility("default")))

// To be raised, here and in octavo/ops/native/library.py, whenever this interface changes: a
// library that was built before is then not used.
enum { OCTAVO_INTERFACE = 1 };
OCTAVO_API int64_t octavo_interface();

// Bits of octavo_features().
enum {
  OCTAVO_AVX2 = 1,         // AVX2, FMA, F16C
  OCTAVO_AVX512 = 2,       // AVX-512 F, BW, DQ, VL
  OCTAVO_AVX512_BF16 = 4,  // and VDPBF16PS
};

// What this CPU and its operating system can run.
OCTAVO_API int64_t octavo_features();

// ---- norms (octavo/ops/norm.py: "rms_norm") ----

// y = x / sqrt(mean(x^2) + eps) * weight. x, y: [rows, size]; weight: [size].
#define OCTAVO_NORM(name, T)                                                                 \
  OCTAVO_API void name(const T* x, const T* weight, T* y, int64_t rows, int64_t size, float eps)
OCTAVO_NORM(octavo_norm_f32_avx2, float);
OCTAVO_NORM(octavo_norm_f32_avx512, float);
OCTAVO_NORM(octavo_norm_bf16_avx2, octavo::bf16);
OCTAVO_NORM(octavo_norm_bf16_avx512, octavo::bf16);
#undef OCTAVO_NORM

// ---- linears (octavo/ops/linear.py: "linear") ----

// What follows the product.
enum {
  OCTAVO_NONE = 0,
  OCTAVO_ADD = 1,       // y + other
  OCTAVO_SILU_MUL = 2,  // silu(gate) * up
  OCTAVO_LOGITS = 3,    // y in FP32
};

// A linear whose weights are packed: panels of 32 lanes, in each of them the inputs two by two, as
// the instructions take them: [panels][(inputs + 1) / 2][32][2], aligned to 64 bytes, zeros where
// there is no output or input. A lane is an output; with OCTAVO_SILU_MUL a panel holds 16 of the
// gate's and then the same 16 of the up projection's.
struct OctavoLinear {
  const octavo::bf16* weights;
  const float* bias;  // [panels][32], in the order of the lanes; null for none
  int64_t inputs;
  int64_t outputs;   // of y: with OCTAVO_SILU_MUL half of the weights' rows
  int64_t epilogue;  // one of the above
};

// Writes weight [rows, inputs] into panels. Its row i goes to panel (first + i) / width, there to
// lane offset + (first + i) % width. The memory of the panels is zero before the first call.
OCTAVO_API void octavo_linear_pack(const octavo::bf16* weight, int64_t rows, int64_t inputs,
                                   int64_t first, int64_t width, int64_t offset,
                                   octavo::bf16* panels);

// y[rows, outputs] = epilogue(x[rows, inputs] . weights + bias, other[rows, outputs]), in FP32 up
// to y, which is BF16 but for OCTAVO_LOGITS and may be ``other``, not x. Every output is summed up
// in one accumulator over ascending inputs, so a row's bits do not depend on the others.
OCTAVO_API void octavo_linear_bf16_avx512bf16(const OctavoLinear* linear, const octavo::bf16* x,
                                              const octavo::bf16* other, void* y, int64_t rows);
// ---- attention (octavo/ops/attention.py: "paged_attention") ----

enum { OCTAVO_ATTENTION_TASK_BYTES = 32 };

// A step's batch of `num_rows` rows and `num_tokens` tokens, for all layers of one geometry.
struct OctavoAttention {
  int64_t num_heads, num_kv_heads, head_dim;  // head_dim even, at most 512
  int64_t window;                             // keys a token sees, itself included; 0: all
  int64_t block_size;
  int64_t num_rows, num_tokens, table_width;
  const int64_t* slots;         // [num_tokens] block * block_size + offset
  const int32_t* query_starts;  // [num_rows + 1]
  const int32_t* seq_lens;      // [num_rows], with this step's tokens
  const int32_t* block_tables;  // [num_rows, table_width]
  const float* cos;             // [num_tokens, head_dim / 2]
  const float* sin;
  float scale, softcap, qk_norm_eps;  // softcap 0: none
  // The plan: `capacity` entries of OCTAVO_ATTENTION_TASK_BYTES, tasks and then merges. Where there
  // are merges, [num_slots, head_dim rounded up to 16, + 16] numbers for parts of sums.
  void* tasks;
  int64_t capacity, num_tasks, num_merges, num_slots;
  float* partials;
};

// Sets num_tasks, num_merges and num_slots, and writes the entries of the plan if `capacity` holds
// them all. The plan depends on the number of threads, no result does.
OCTAVO_API void octavo_attention_plan(OctavoAttention* step);

// One layer: q/k norm, rotation, writing of keys and values, attention.
// qkv: [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim], queries and keys are overwritten.
// cache: [block, num_kv_heads, keys | values, block_size rounded up to 16 / 16, 16 * (head_dim
// rounded up to 16)] with elements of qkv's type. qk_weight: null or [num_heads + num_kv_heads,
// head_dim]. sinks: null or [num_heads]. out: [num_tokens, num_heads * head_dim].
#define OCTAVO_ATTENTION(name, T)                                                          \
  OCTAVO_API void name(const OctavoAttention* step, T* qkv, T* cache, const T* qk_weight, \
                       const float* sinks, T* out)
OCTAVO_ATTENTION(octavo_attention_f32_avx2, float);
OCTAVO_ATTENTION(octavo_attention_f32_avx512, float);
OCTAVO_ATTENTION(octavo_attention_bf16_avx2, octavo::bf16);
OCTAVO_ATTENTION(octavo_attention_bf16_avx512, octavo::bf16);
OCTAVO_ATTENTION(octavo_attention_bf16_avx512bf16, octavo::bf16);
#undef OCTAVO_ATTENTION
