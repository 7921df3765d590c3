// The C interface of octavo's CPU kernels.
//
// Called through ctypes on addresses, with the GIL released but for calls of microseconds. Shapes
// are row-major; BF16 and FP16 numbers are uint16_t. Nothing that is allocated outlives a call, but
// for a buffer of each thread. Each instruction set is a source file of its own that begins by
// naming its target, so that one build serves every x86-64 machine; the caller asks
// octavo_features() which of them may run.
#pragma once

#include <cstdint>

#include "numbers.h"

#define OCTAVO_API extern "C" __attribute__((visibility("default")))

// To be raised, here and in octavo/ops/native/library.py, whenever this interface changes: a
// library that was built before is then not used.
enum { OCTAVO_INTERFACE = 7 };
OCTAVO_API int64_t octavo_interface();

// Bits of octavo_features().
enum {
  OCTAVO_AVX2 = 1,         // AVX2, FMA, F16C
  OCTAVO_AVX512 = 2,       // AVX-512 F, BW, DQ, VL
  OCTAVO_AVX512_BF16 = 4,  // and VDPBF16PS
  OCTAVO_AVX512_VNNI = 8,  // AVX-512 F, BW, DQ, VL and VPDPBUSD
  OCTAVO_AMX = 16,         // both of these, AMX's tiles, INT8 and BF16, and leave to use them
};

// What this CPU and its operating system can run. Linux is asked for AMX's registers, which a
// process may use once it has asked.
OCTAVO_API int64_t octavo_features();

// ---- running kernels ----

// A kernel is called by every thread of a team at once, with the address of its arguments (a struct
// named Octavo...Call), and shares its work out among them. When it returns, all of it is done.
using OctavoKernel = void(const void* arguments);

struct OctavoCall {
  OctavoKernel* kernel;
  const void* arguments;
};

// Runs the calls one after the other, in one team.
OCTAVO_API void octavo_run(const OctavoCall* calls, int64_t count);

// Numbers of rows are addresses: calls that are kept serve steps of any size.

// Element types of what is computed with.
enum { OCTAVO_F32 = 0, OCTAVO_BF16 = 1 };

// ---- norms (octavo/ops/norm.py: "rms_norm") ----

// y = x / sqrt(mean(x^2) + eps) * weight. x, y: [rows, size]; weight: [size].
struct OctavoNormCall {
  const void* x;
  const void* weight;
  void* y;
  const int64_t* rows;
  int64_t size;
  float eps;
};
OCTAVO_API OctavoKernel octavo_norm_f32_avx2;
OCTAVO_API OctavoKernel octavo_norm_f32_avx512;
OCTAVO_API OctavoKernel octavo_norm_bf16_avx2;
OCTAVO_API OctavoKernel octavo_norm_bf16_avx512;

// ---- layer norms, activations, sums (octavo/ops/norm.py, activation.py, add.py) ----

// y = (x - mean(x)) / sqrt(var(x) + eps) * weight + bias. x, y: [rows, size]; weight, bias: [size].
struct OctavoLayerNormCall {
  const void* x;
  const void* weight;
  const void* bias;
  void* y;
  const int64_t* rows;
  int64_t size;
  float eps;
};

enum { OCTAVO_SILU = 0, OCTAVO_GELU = 1, OCTAVO_GELU_TANH = 2, OCTAVO_RELU = 3 };

// y = activation(x), or with `gated` activation(first half of x) * second half. y: [rows, size]; x:
// [rows, size] or [rows, 2 * size]. In FP32 up to y.
struct OctavoActivateCall {
  const void* x;
  void* y;
  const int64_t* rows;
  int64_t size;
  int64_t activation;  // one of the above
  int64_t gated;
};

// y = x + scale * other, or without x scale * other; y may be one of them. All [rows, size].
struct OctavoAddCall {
  const void* x;
  const void* other;
  void* y;
  const int64_t* rows;
  int64_t size;
  float scale;
};
OCTAVO_API OctavoKernel octavo_layer_norm_f32_avx2;
OCTAVO_API OctavoKernel octavo_layer_norm_f32_avx512;
OCTAVO_API OctavoKernel octavo_layer_norm_bf16_avx2;
OCTAVO_API OctavoKernel octavo_layer_norm_bf16_avx512;
OCTAVO_API OctavoKernel octavo_activate_f32_avx2;
OCTAVO_API OctavoKernel octavo_activate_f32_avx512;
OCTAVO_API OctavoKernel octavo_activate_bf16_avx2;
OCTAVO_API OctavoKernel octavo_activate_bf16_avx512;
OCTAVO_API OctavoKernel octavo_add_f32_avx2;
OCTAVO_API OctavoKernel octavo_add_f32_avx512;
OCTAVO_API OctavoKernel octavo_add_bf16_avx2;
OCTAVO_API OctavoKernel octavo_add_bf16_avx512;

// ---- rows of a matrix (octavo/ops/rows.py: "take_rows") ----

// y[i] = x[index[i]]. A row has `row_bytes`.
struct OctavoTakeCall {
  const void* x;
  const int64_t* index;
  void* y;
  const int64_t* rows;  // of y
  int64_t row_bytes;
};
OCTAVO_API OctavoKernel octavo_take_rows;

// ---- linears (octavo/ops/linear.py: "linear", "quantized_linear", "weight_only_linear") ----

// What follows the product.
enum {
  OCTAVO_NONE = 0,
  OCTAVO_ADD = 1,       // y + other
  OCTAVO_SILU_MUL = 2,  // silu(gate) * up
  OCTAVO_LOGITS = 3,    // y in FP32
  OCTAVO_LARGEST = 4,   // y: FP32 [rows, panels], the largest output of each panel; ids: int32
                        // [rows, panels], the first of the outputs that are as large
};

// A linear whose weights are packed in panels of 32 lanes, aligned to 64 bytes, zeros where there
// is no output or input. A lane is an output; with OCTAVO_SILU_MUL a panel holds 16 of the gate's
// and then the same 16 of the up projection's.
//
// Dense weights (bits 0) have x's type. The inputs of a panel lie one by one in FP32 and two by two
// in BF16, as the instructions take them: [panels][inputs][32] or [panels][inputs / 2][32][2], where
// inputs in BF16 are rounded up to a multiple of 32, what a tile of AMX takes.
//
// Quantized weights are (code - zero) * scale + minimum, codes of 2, 3, 4 or 8 bits, with a scale
// and perhaps a minimum for each output and `group` inputs (a multiple of 4, with 2 and 3 bits of
// 16, at most 65,536; the last group may be shorter). [panels][groups] of: scales [32]; minimums [32], if there are any; codes,
// [group / 4][32][4] bytes with 8 bits and [group / 4][16][4] with 4, where the code of lane 16 + i
// lies above that of lane i; with 2 [group / 16][2][16][4], where two quads' of both lanes lie above
// each other; with 3 these, and after each [16][4] of the third bits of all four quads. With `has_zeros`, instead of minimums, int8 [32]: what is to be
// subtracted from the codes of the group beyond `zero`.
//
// Weights that are expanded (`coding`) become dense ones, a panel or a part of one at a time, where
// they are multiplied: see linear_expanded.h.
enum {
  OCTAVO_TABLE = 1,   // table[code], codes of 2, 3 or 4 bits
  OCTAVO_TABLES = 2,  // the same with a table of each lane
  OCTAVO_BYTES = 3,   // code - zero, codes of 8 bits
  OCTAVO_E4M3 = 4,    // FP8 times 2^-8: scales make up for it
  OCTAVO_E5M2 = 5,
};

// Numbers added to expanded weights, by panels: those of panel p are `starts[p]` to `starts[p + 1]`,
// ascending by column.
struct OctavoOutliers {
  const int64_t* starts;  // [panels + 1]
  const int32_t* columns;
  const int32_t* lanes;
  const float* values;
};

struct OctavoLinear {
  const void* weights;
  const float* bias;  // [panels][32], in the order of the lanes; null for none
  int64_t inputs;
  int64_t outputs;   // of y: with OCTAVO_SILU_MUL half of the weights' rows
  int64_t stride;    // outputs from a row of y and other to the next, at least `outputs`
  int64_t epilogue;  // one of the above
  int64_t element;   // OCTAVO_F32 or OCTAVO_BF16: of x, other and y
  int64_t bits;      // of a code: 2, 3, 4 or 8; 0 if they are dense
  int64_t group;     // 0: expanded weights without scales of groups
  int64_t zero;
  int64_t has_minimums;
  int64_t wide_scales;   // scales and minimums are in FP32, otherwise in FP16
  int64_t has_zeros;     // of groups, beside scales and without minimums
  const int32_t* order;  // [inputs]: input order[i] stands at place i; null: each at its own
  int64_t coding;        // of expanded weights; 0 for others
  int64_t scales_sums;   // scales of groups, of whole blocks of 32 inputs and without minimums and
                         // zeros, multiply sums of expanded weights, not these
  const float* table;    // [2^bits], with OCTAVO_TABLE
  const float* lane_scales;        // [panels][32]: of sums of expanded weights; null for none
  const OctavoOutliers* outliers;  // of expanded weights; null for none
};

// Bytes of the packed weights.
OCTAVO_API int64_t octavo_linear_bytes(const OctavoLinear* linear);

// Writes rows of weights into panels. Row i of them goes to panel (first + i) / width, there to
// lane offset + (first + i) % width. The memory of the panels is zero before the first call.
struct OctavoPlace {
  int64_t rows, first, width, offset;
};
// weight: [rows, inputs], of the linear's element type.
OCTAVO_API void octavo_linear_pack(const OctavoLinear* linear, const void* weight,
                                   const OctavoPlace* place);
// codes: [rows, inputs]; scales, minimums, zeros: [rows, groups].
OCTAVO_API void octavo_linear_pack_codes(const OctavoLinear* linear, const uint8_t* codes,
                                         const void* scales, const void* minimums,
                                         const int8_t* zeros, const OctavoPlace* place);

// Rows of weights that are expanded. codes: [rows, inputs], FP8 as bytes; scales, minimums, zeros:
// [rows, groups]; tables: [rows, 2^bits].
struct OctavoExpandedRows {
  const uint8_t* codes;
  const void* scales;
  const void* minimums;
  const uint8_t* zeros;
  const float* tables;
};
OCTAVO_API void octavo_linear_pack_expanded(const OctavoLinear* linear,
                                            const OctavoExpandedRows* from,
                                            const OctavoPlace* place);

// Dense weights as codes of 8 bits around 128 with a scale for each output and group of inputs:
// max |weight| / 127, to the nearest, ties to even.
struct OctavoQuantize {
  const void* weight;  // [rows, inputs]
  int64_t rows, inputs, group;
  int64_t element;  // of weight
  uint8_t* codes;   // [rows, inputs]
  float* scales;    // [rows, groups]
};
OCTAVO_API void octavo_quantize(const OctavoQuantize* arguments);

// y[rows, outputs] = epilogue(x[rows, inputs] . weights + bias, other[rows, outputs]), in FP32 up
// to y, which may be `other`, not x. A row's bits do not depend on the others.
//
// Dense: every output is one sum over ascending inputs; with AMX one of sums over 32 inputs, each of
// which is that of the even ones plus that of the odd ones. Quantized: x is rounded to 8 bits first,
// each row of each group of inputs by a scale of its own, max |x| / 127, to the nearest, ties to
// even; sums within a group are exact, those of groups are added in ascending order. Expanded: as
// dense ones, which in BF16 are the weights rounded to it; scales of lanes and outliers are in FP32.
struct OctavoLinearCall {
  const OctavoLinear* linear;
  const void* x;
  const void* other;
  void* y;
  int32_t* ids;   // with OCTAVO_LARGEST
  void* scratch;  // octavo_linear_scratch(linear, rows) bytes, aligned to 64
  const int64_t* rows;
};
OCTAVO_API int64_t octavo_linear_scratch(const OctavoLinear* linear, int64_t rows);
OCTAVO_API OctavoKernel octavo_linear_f32_avx2;
OCTAVO_API OctavoKernel octavo_linear_f32_avx512;
OCTAVO_API OctavoKernel octavo_linear_bf16_avx512bf16;
OCTAVO_API OctavoKernel octavo_linear_quantized_avx2;
OCTAVO_API OctavoKernel octavo_linear_quantized_avx512vnni;
OCTAVO_API OctavoKernel octavo_linear_bf16_amx;
OCTAVO_API OctavoKernel octavo_linear_quantized_amx;
OCTAVO_API OctavoKernel octavo_linear_expanded_f32_avx2;
OCTAVO_API OctavoKernel octavo_linear_expanded_f32_avx512;
OCTAVO_API OctavoKernel octavo_linear_expanded_bf16_avx512bf16;
OCTAVO_API OctavoKernel octavo_linear_expanded_bf16_amx;
// The same numbers without AMX (they need AVX512_BF16 and AVX512_VNNI), slowly: for tests.
OCTAVO_API OctavoKernel octavo_linear_bf16_amx_emulated;
OCTAVO_API OctavoKernel octavo_linear_quantized_amx_emulated;
OCTAVO_API OctavoKernel octavo_linear_expanded_bf16_amx_emulated;

// y[i] = row ids[i] of quantized or expanded weights with OCTAVO_NONE or OCTAVO_LOGITS, its inputs in
// their own places. y: [rows, inputs], of the element type.
struct OctavoLookupCall {
  const OctavoLinear* linear;
  const int64_t* ids;
  void* y;
  const int64_t* rows;
};
OCTAVO_API OctavoKernel octavo_linear_lookup;
OCTAVO_API OctavoKernel octavo_linear_lookup_expanded;

// ---- attention (octavo/ops/attention.py: "paged_attention") ----

enum { OCTAVO_ATTENTION_TASK_BYTES = 32 };

// What a cache keeps keys and values in, see OctavoAttentionCall.
enum { OCTAVO_KEPT_AS_THEY_COME = 0, OCTAVO_KEPT_INT8 = 1, OCTAVO_KEPT_E4M3 = 2, OCTAVO_KEPT_E5M2 = 3 };

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
  int64_t kept;  // one of the above
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
// rounded up to 16)] with elements of qkv's type, or of 8 bits. OCTAVO_KEPT_INT8: a tile ends with
// FP32 [16], a scale for each token: key or value = int8 * scale, scale = max |x| / 127. E4M3, E5M2:
// key or value = number * the scale of its kv head, what is too large for one becomes the largest.
// qk_weight: null or [num_heads + num_kv_heads, head_dim]. sinks: null or [num_heads]. kv_scales:
// null (all 1) or [keys | values, num_kv_heads]. out: [num_tokens, num_heads * head_dim].
struct OctavoAttentionCall {
  const OctavoAttention* step;
  void* qkv;
  void* cache;
  const void* qk_weight;
  const float* sinks;
  const float* kv_scales;
  void* out;
};
OCTAVO_API OctavoKernel octavo_attention_f32_avx2;
OCTAVO_API OctavoKernel octavo_attention_f32_avx512;
OCTAVO_API OctavoKernel octavo_attention_bf16_avx2;
OCTAVO_API OctavoKernel octavo_attention_bf16_avx512;
OCTAVO_API OctavoKernel octavo_attention_bf16_avx512bf16;
OCTAVO_API OctavoKernel octavo_attention_bf16_amx;  // head_dim: a multiple of 32
OCTAVO_API OctavoKernel octavo_attention_bf16_amx_emulated;  // for tests, as of the linears

// ---- collectives of ranks that share memory (octavo/ops/native/collectives.py) ----

// Why an exchange failed: a process has ended, or it has not come in time.
enum { OCTAVO_ENDED = 1, OCTAVO_LATE = 2 };

// One rank of a group; its own, while `memory` is everybody's. Its exchanges are made one after the
// other; all ranks make the same ones in the same order. After one that failed none is made.
struct OctavoShared {
  void* memory;  // octavo_shared_bytes(size, capacity), aligned to 64, zeros at first
  int64_t rank, size;
  int64_t capacity;          // bytes of one of a rank's two buffers, a multiple of 64
  int64_t spin, timeout;     // ns to wait for another rank: at full speed; at all
  const int32_t* processes;  // [size] pidfds of the ranks; -1: not looked at
  int64_t begun;             // exchanges so far
  int64_t failure, failed_rank;
};
OCTAVO_API int64_t octavo_shared_bytes(int64_t size, int64_t capacity);

// Element types of sums beside OCTAVO_F32 and OCTAVO_BF16.
enum { OCTAVO_F16 = 2, OCTAVO_F64 = 3, OCTAVO_I32 = 4, OCTAVO_I64 = 5 };

// x becomes the sum of all ranks' x, [rows, width]. Summed in order of ranks, BF16 and FP16 in FP32:
// the same bits on every rank.
struct OctavoAllReduceCall {
  OctavoShared* group;
  void* x;
  const int64_t* rows;
  int64_t width;
  int64_t element;  // one of the above
};
OCTAVO_API OctavoKernel octavo_all_reduce_avx2;

// y = all ranks' x side by side. x: [rows, widths[rank]] bytes; y: [rows, sum of widths].
struct OctavoAllGatherCall {
  OctavoShared* group;
  const void* x;
  void* y;
  const int64_t* rows;
  const int64_t* widths;  // [size]
};
OCTAVO_API OctavoKernel octavo_all_gather;

// x becomes that of the rank `source`. x: [rows, row_bytes].
struct OctavoBroadcastCall {
  OctavoShared* group;
  void* x;
  const int64_t* rows;
  int64_t row_bytes;
  int64_t source;
};
OCTAVO_API OctavoKernel octavo_broadcast;
