"""Paged attention on CPU by the kernels of csrc/: a call does all of a layer, from q/k norm on.

Cache: [block, kv head, k|v, tile, 16 * width], tiles of 16 tokens in the order in which the
kernels' vectors want them (csrc/attention_layout.h); width is head_dim rounded up to 16. In int8 it
is [..., tile, 16 * width + 64]: a tile ends with the FP32 scales of its tokens.
"""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int64, c_void_p
from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.ops.attention import AttentionGeometry, BatchColumns, Rope
from octavo.ops.native import calls
from octavo.ops.native.library import Features, Kernels, brief_function, preferred
from octavo.ops.registry import register

TILE = 16  # tokens of a tile of the cache
MAX_HEAD_DIM = 512
TASK_BYTES = 32  # of an entry of a plan
# OCTAVO_KEPT_... of csrc/octavo.h, by the geometry's cache_dtype.
KEPT = {None: 0, torch.int8: 1, torch.float8_e4m3fn: 2, torch.float8_e5m2: 3}
AMX, AMX_DIMS = "octavo_attention_bf16_amx", 32  # of whose multiple a head_dim must be
KERNELS: dict[torch.dtype, Kernels] = {
    torch.float32: (
        (Features.AVX512, "octavo_attention_f32_avx512"),
        (Features.AVX2, "octavo_attention_f32_avx2"),
    ),
    torch.bfloat16: (
        (Features.AMX, AMX),
        (Features.AVX512_BF16, "octavo_attention_bf16_avx512bf16"),
        (Features.AVX512, "octavo_attention_bf16_avx512"),
        (Features.AVX2, "octavo_attention_bf16_avx2"),
    ),
}


class _Step(ctypes.Structure):
    """OctavoAttention of csrc/octavo.h."""

    _fields_ = (
        *((name, c_int64) for name in ("num_heads", "num_kv_heads", "head_dim", "window")),
        *((name, c_int64) for name in ("block_size", "num_rows", "num_tokens", "table_width")),
        *((name, c_void_p) for name in ("slots", "query_starts", "seq_lens", "block_tables")),
        *((name, c_void_p) for name in ("cos", "sin")),
        *((name, c_float) for name in ("scale", "softcap", "qk_norm_eps")),
        ("kept", c_int64),
        ("tasks", c_void_p),
        *((name, c_int64) for name in ("capacity", "num_tasks", "num_merges", "num_slots")),
        ("partials", c_void_p),
    )


class _Call(ctypes.Structure):
    """OctavoAttentionCall of csrc/octavo.h."""

    _fields_ = tuple(
        (name, c_void_p)
        for name in ("step", "qkv", "cache", "qk_weight", "sinks", "kv_scales", "out")
    )


@dataclass(slots=True)
class _State:
    """What a step's layers share. The kernels read ``step`` where it lies."""

    step: _Step
    kernel: str
    dtype: torch.dtype
    kept: tuple[Tensor, ...]  # what ``step`` points at

    def become(self, other: _State) -> None:
        """Calls that were made with this state are those of another step from now on."""
        ctypes.memmove(
            ctypes.addressof(self.step), ctypes.addressof(other.step), ctypes.sizeof(_Step)
        )
        self.kept = other.kept


def kernel_name(dtype: torch.dtype, head_dim: int) -> str | None:
    """The kernel that this CPU runs for ``dtype``."""
    kernels = KERNELS.get(dtype, ())
    if head_dim % AMX_DIMS:
        kernels = tuple((needed, name) for needed, name in kernels if name != AMX)
    return preferred(kernels)


def available(device: str, dtype: torch.dtype) -> bool:
    return device == "cpu" and preferred(KERNELS.get(dtype, ())) is not None


@register("paged_attention", "native", available, tolerance=8.0, batch_invariant="yes")
class NativePagedAttention:
    """Products of BF16 are summed in FP32, the softmax is in FP32, its weights are rounded to the
    dtype of qkv. A token's result is the same bits in any batch and however its prompt is cut,
    where its rotation is (not with angles that depend on a context's length).

    Raises ValueError for an odd head_dim or one above ``MAX_HEAD_DIM``, and for a cache_dtype that
    is not in ``KEPT``."""

    def __init__(self, geometry: AttentionGeometry) -> None:
        if geometry.head_dim % 2 or geometry.head_dim > MAX_HEAD_DIM:
            raise ValueError(
                f"attention on CPUs is written for even head_dim up to {MAX_HEAD_DIM}, "
                f"not {geometry.head_dim}"
            )
        if geometry.cache_dtype not in KEPT:
            raise ValueError(f"a cache of {geometry.cache_dtype} is not written for CPUs")
        self.geometry = geometry
        self._width = -(-geometry.head_dim // TILE) * TILE
        self._capacity = 256  # entries of a plan, more where a step wanted more
        self._partials = torch.empty(0)  # parts of sums of long contexts, within one call
        self._plan = brief_function("octavo_attention_plan", c_void_p)
        self._kernels = {
            dtype: name
            for dtype in KERNELS
            if (name := kernel_name(dtype, geometry.head_dim)) is not None
        }

    def kv_shape(self, num_blocks: int, block_size: int) -> tuple[int, ...]:
        tiles = -(-block_size // TILE)
        rounded = self.geometry.cache_dtype == torch.int8
        scales = TILE * torch.float32.itemsize if rounded else 0
        return (num_blocks, self.geometry.num_kv_heads, 2, tiles, TILE * self._width + scales)

    def prepare(self, batch: BatchColumns, rope: Rope, dtype: torch.dtype) -> _State:
        geometry = self.geometry
        starts, lengths = batch.query_starts, batch.seq_lens
        of_tokens = lengths.long()
        if len(batch.positions) != len(lengths):
            of_tokens = of_tokens.repeat_interleave(starts.diff())
        cos, sin = (t.contiguous() for t in rope(batch.positions, of_tokens))
        tables = batch.block_tables.contiguous()
        step = _Step(
            geometry.num_heads,
            geometry.num_kv_heads,
            geometry.head_dim,
            geometry.window or 0,
            batch.block_size,
            len(lengths),
            len(batch.positions),
            tables.shape[1],
            batch.slot_mapping.data_ptr(),
            starts.data_ptr(),
            lengths.data_ptr(),
            tables.data_ptr(),
            cos.data_ptr(),
            sin.data_ptr(),
            geometry.scale,
            geometry.softcap or 0.0,
            geometry.qk_norm_eps or 0.0,
            KEPT[geometry.cache_dtype],
        )
        tasks = self._plan_tasks(step)
        kept = (batch.slot_mapping, starts, lengths, tables, cos, sin, tasks, self._partials)
        return _State(step, self._kernels[dtype], dtype, kept)

    def _plan_tasks(self, step: _Step) -> Tensor:
        while True:
            tasks = torch.empty(self._capacity * TASK_BYTES, dtype=torch.uint8)
            step.tasks, step.capacity = tasks.data_ptr(), self._capacity
            self._plan(ctypes.addressof(step))
            needed = step.num_tasks + step.num_merges
            if needed <= self._capacity:
                break
            self._capacity = 2 * needed
        size = step.num_slots * (self._width + TILE)
        if size > self._partials.numel():
            self._partials = torch.empty(size)
        step.partials = self._partials.data_ptr()
        return tasks

    def __call__(
        self,
        qkv: Tensor,
        cache: Tensor,
        state: _State,
        qk_weight: Tensor | None = None,
        sinks: Tensor | None = None,
        kv_scales: Tensor | None = None,
    ) -> Tensor:
        kept_in = self.geometry.cache_dtype or qkv.dtype
        if cache.dtype != kept_in:
            raise ValueError(f"the cache must be {kept_in}, not {cache.dtype}")
        if qkv.dtype != state.dtype:
            raise ValueError(f"prepared for {state.dtype}, not {qkv.dtype}")
        qkv = qkv.contiguous()
        if qk_weight is not None and qk_weight.dtype != qkv.dtype:
            qk_weight = qk_weight.to(qkv.dtype)
        qk_weight = None if qk_weight is None else qk_weight.contiguous()
        if sinks is not None:
            sinks = sinks.float().contiguous()
        out = calls.empty(len(qkv), self.geometry.num_heads * self.geometry.head_dim, qkv.dtype)
        arguments = _Call(
            ctypes.addressof(state.step),
            qkv.data_ptr(),
            cache.data_ptr(),
            None if qk_weight is None else qk_weight.data_ptr(),
            None if sinks is None else sinks.data_ptr(),
            None if kv_scales is None else kv_scales.data_ptr(),
            out.data_ptr(),
        )
        calls.call(state.kernel, arguments, state, cache, qk_weight, sinks, kv_scales)
        return out
