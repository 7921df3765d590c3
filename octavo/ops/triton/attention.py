"""Paged attention in Triton: the version for GPUs.

Rows with one token go through decode_attention, one kernel that does all; the others through
rope_cache and prefill_attention. Nothing here reads lengths on the host, so that a captured step
can be replayed with others: the shapes of the batch bound what is launched.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from octavo.ops.attention import AttentionGeometry, BatchColumns, Rope
from octavo.ops.registry import register
from octavo.ops.triton import launch
from octavo.ops.triton.attention_configs import (
    WORKSPACE_BYTES,
    DecodeConfig,
    PrefillConfig,
    decode_config,
    group_of,
    most_parts,
    padded,
    prefill_config,
)
from octavo.ops.triton.decode_attention import decode_attention_kernel
from octavo.ops.triton.kept import KINDS, piece_size
from octavo.ops.triton.prefill_attention import prefill_attention_kernel
from octavo.ops.triton.rope_cache import rope_cache_kernel

SPLITS_AT_ONCE = 32  # merged in one step


@dataclass(slots=True)
class Workspace:
    """What splits of one context pass to each other. ``arrived`` is all zeros between launches."""

    partial: Tensor  # FP32, WORKSPACE_BYTES
    state: Tensor  # FP32
    arrived: Tensor  # int32
    ones: Tensor  # FP32 [2, kv heads], scales of FP8 where there are none

    @staticmethod
    def allocate(geometry: AttentionGeometry, device: torch.device) -> Workspace:
        parts = most_parts(geometry)
        state = 2 * group_of(geometry) * parts
        return Workspace(
            torch.empty(WORKSPACE_BYTES // 4, dtype=torch.float32, device=device),
            torch.empty(state, dtype=torch.float32, device=device),
            torch.zeros(parts, dtype=torch.int32, device=device),
            torch.ones(2, geometry.num_kv_heads, dtype=torch.float32, device=device),
        )


@dataclass(slots=True)
class Layer:
    """What attention gets of one layer; see ``PagedAttention.__call__``. ``scales``: FP32, what
    kernels take as ``scale_ptr``."""

    cache: Tensor
    qk_weight: Tensor | None = None
    sinks: Tensor | None = None
    scales: Tensor | None = None


@dataclass(slots=True)
class Step:
    """``rotations``: FP32 [positions, d], cos, then sin; [T, d] if ``by_token``."""

    batch: BatchColumns
    rotations: Tensor
    by_token: bool
    workspace: Workspace


def rotations_by_token(batch: BatchColumns, rope: Rope) -> Tensor:
    """FP32 [T, d] where angles depend on the lengths of contexts, found on the device."""
    starts, positions = batch.query_starts, batch.positions
    tokens = torch.arange(len(positions), dtype=starts.dtype, device=positions.device)
    rows = torch.searchsorted(starts[1:], tokens, right=True).clamp_(max=len(starts) - 2)
    return torch.cat(rope(positions, batch.seq_lens[rows].long()), dim=1)


def score_scales(geometry: AttentionGeometry) -> tuple[float, float | None]:
    """Of query times key, ``scale`` and ``inner`` of the kernels: to units of log 2, and with
    softcap what the exponent of tanh takes."""
    scale = geometry.scale
    if geometry.softcap is None:
        return scale * math.log2(math.e), None
    inner = 2 * math.log2(math.e) * scale / geometry.softcap
    return geometry.softcap * math.log2(math.e), inner


@register("paged_attention", "triton", launch.available, tolerance=8.0)
class TritonPagedAttention:
    """Cache: [block, kv head, k|v, offset, d]; block_size a power of two, 16 at least. With int8
    [block, kv head, k|v, block_size * (d + 4)]: the numbers, then their FP32 scales."""

    def __init__(self, geometry: AttentionGeometry) -> None:
        if geometry.cache_dtype not in KINDS:
            raise ValueError(f"a cache of {geometry.cache_dtype} is not written in Triton")
        self.geometry = geometry
        self.kind = KINDS[geometry.cache_dtype]
        self._workspace: Workspace | None = None

    def kv_shape(self, num_blocks: int, block_size: int) -> tuple[int, ...]:
        if block_size < 16 or block_size & (block_size - 1):
            raise ValueError(f"block size {block_size}: must be a power of two, 16 at least")
        heads, dim = self.geometry.num_kv_heads, self.geometry.head_dim
        if self.geometry.cache_dtype == torch.int8:
            return (num_blocks, heads, 2, piece_size(block_size, dim, self.kind))
        return (num_blocks, heads, 2, block_size, dim)

    def prepare(self, batch: BatchColumns, rope: Rope, dtype: torch.dtype) -> Step:
        """The first call on a device takes memory there: not while a graph is captured."""
        device = batch.positions.device
        if self._workspace is None:
            if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                raise RuntimeError("paged attention: run one step before a CUDA graph is captured")
            self._workspace = Workspace.allocate(self.geometry, device)
        rotations = rope.table(rope.max_position, device)
        if rotations is None:
            return Step(batch, rotations_by_token(batch, rope), True, self._workspace)
        return Step(batch, rotations, False, self._workspace)

    def __call__(
        self,
        qkv: Tensor,
        cache: Tensor,
        state: Step,
        qk_weight: Tensor | None = None,
        sinks: Tensor | None = None,
        kv_scales: Tensor | None = None,
    ) -> Tensor:
        batch, geometry = state.batch, self.geometry
        kept_in = geometry.cache_dtype or qkv.dtype
        if cache.dtype != kept_in:
            raise ValueError(f"the cache must be {kept_in}, not {cache.dtype}")
        layer = self.layer(cache, state, qk_weight, sinks, kv_scales)
        out = qkv.new_empty(len(qkv), geometry.num_heads * geometry.head_dim)
        rows, tokens = len(batch.seq_lens) - batch.decode_rows, len(qkv) - batch.decode_rows
        if tokens:
            self.rope_cache(qkv, layer, out, state)
        context = batch.block_tables.shape[1] * batch.block_size
        if batch.queries > 1:
            config = decode_config(geometry, rows, context, batch.queries)
            self.decode(qkv, layer, out, state, config, batch.queries)
            return out
        if tokens and rows:
            self.attend_rest(qkv, layer, out, state)
        if batch.decode_rows:
            config = decode_config(geometry, batch.decode_rows, context)
            self.decode(qkv, layer, out, state, config)
        return out

    def layer(
        self,
        cache: Tensor,
        step: Step,
        qk_weight: Tensor | None = None,
        sinks: Tensor | None = None,
        kv_scales: Tensor | None = None,
    ) -> Layer:
        """``kv_scales``: as of ``PagedAttention.__call__``."""
        if self.geometry.cache_dtype is None:
            return Layer(cache, qk_weight, sinks)
        if self.geometry.cache_dtype == torch.int8:
            return Layer(cache, qk_weight, sinks, cache.view(torch.float32))
        scales = step.workspace.ones if kv_scales is None else kv_scales
        return Layer(cache, qk_weight, sinks, scales)

    def rope_cache(self, qkv: Tensor, layer: Layer, out: Tensor, step: Step) -> None:
        """Tokens after the decode rows': q in place, k and v into the cache, 0 into ``out`` where
        the token is padding."""
        geometry, batch = self.geometry, step.batch
        first = batch.decode_rows
        rope_cache_kernel[(len(qkv) - first,)](
            qkv,
            layer.cache,
            layer.scales,
            out,
            batch.slot_mapping,
            batch.positions,
            step.rotations,
            layer.qk_weight,
            first,
            geometry.qk_norm_eps,
            HEADS=geometry.num_heads,
            KV_HEADS=geometry.num_kv_heads,
            DIM=geometry.head_dim,
            HALF_PAD=launch.next_power_of_2(geometry.head_dim // 2),
            BLOCK_SIZE=batch.block_size,
            QK_NORM=geometry.qk_norm_eps is not None,
            BY_TOKEN=step.by_token,
            HEADS_AT_ONCE=min(8, launch.next_power_of_2(geometry.num_heads)),
            KIND=self.kind,
            **launch.options(4),
        )

    def attend_rest(self, qkv: Tensor, layer: Layer, out: Tensor, step: Step) -> None:
        """Rows after the decode rows, once rope_cache is done with their tokens."""
        batch, first = step.batch, step.batch.decode_rows
        rows, tokens = len(batch.seq_lens) - first, len(qkv) - first
        config = prefill_config(self.geometry, rows, tokens, batch.block_size, launch.has_pdl())
        self.prefill(qkv, layer, out, step, config)

    def prefill(
        self, qkv: Tensor, layer: Layer, out: Tensor, step: Step, config: PrefillConfig
    ) -> None:
        """``attend_rest`` with tile sizes given."""
        geometry, batch = self.geometry, step.batch
        first, kv_heads, dim = batch.decode_rows, geometry.num_kv_heads, geometry.head_dim
        rows = len(batch.seq_lens) - first
        tiles = (len(qkv) - first) // (config.rows // group_of(geometry)) + rows
        scale, inner = score_scales(geometry)
        cache_rows = None
        if config.tma:
            lines = layer.cache.view(-1, dim)
            cache_rows = TensorDescriptor.from_tensor(lines, [config.tile, dim])
        prefill_attention_kernel[(tiles, kv_heads)](
            qkv,
            layer.cache,
            cache_rows,
            layer.scales,
            out,
            batch.query_starts,
            batch.seq_lens,
            batch.block_tables,
            layer.sinks,
            first,
            rows,
            batch.block_tables.stride(0),
            scale,
            inner,
            HEADS=geometry.num_heads,
            KV_HEADS=kv_heads,
            DIM=dim,
            DIM_PAD=padded(dim),
            BLOCK_SIZE=batch.block_size,
            ROWS=config.rows,
            TILE=config.tile,
            STAGES=config.stages,
            WINDOW=geometry.window or 0,
            SOFTCAP=geometry.softcap is not None,
            SINKS=layer.sinks is not None,
            KIND=self.kind,
            ASM=not launch.INTERPRETED,
            TMA=config.tma,
            ALIKE=config.alike,
            **launch.options(config.warps, num_stages=config.stages),
        )

    def decode(
        self,
        qkv: Tensor,
        layer: Layer,
        out: Tensor,
        step: Step,
        config: DecodeConfig,
        queries: int = 1,
    ) -> None:
        """The first rows. Of one token each: norm, RoPE, cache write and attention. Of more, all
        of the same number (a token and its drafts): attention, after rope_cache."""
        geometry, batch = self.geometry, step.batch
        wide, live = padded(geometry.head_dim), group_of(geometry) * queries
        scale, inner = score_scales(geometry)
        # At one row, launching it normally between kernels with early triggers is faster.
        pdl = launch.pdl_for(len(qkv))
        pdl = launch.OFF if pdl == launch.EARLY else pdl
        at_once = min(128 * config.warps // wide, launch.next_power_of_2(live))
        rows = batch.decode_rows if queries == 1 else len(batch.seq_lens)
        decode_attention_kernel[(geometry.num_kv_heads, rows, config.splits)](
            qkv,
            layer.cache,
            layer.cache.view(torch.int16) if self.kind else None,
            layer.scales,
            out,
            batch.slot_mapping,
            batch.seq_lens,
            batch.block_tables,
            step.rotations,
            layer.qk_weight,
            layer.sinks,
            step.workspace.partial,
            step.workspace.state,
            step.workspace.arrived,
            batch.block_tables.stride(0),
            config.min_tiles,
            scale,
            inner,
            geometry.qk_norm_eps,
            HEADS=geometry.num_heads,
            KV_HEADS=geometry.num_kv_heads,
            DIM=geometry.head_dim,
            DIM_PAD=wide,
            ROWS=max(16, launch.next_power_of_2(live)),
            QUERIES=queries,
            BLOCK_SIZE=batch.block_size,
            TILE=config.tile,
            STAGES=config.stages,
            WINDOW=geometry.window or 0,
            QK_NORM=geometry.qk_norm_eps is not None,
            BY_TOKEN=step.by_token,
            SOFTCAP=geometry.softcap is not None,
            SINKS=layer.sinks is not None,
            KIND=self.kind,
            ASM=not launch.INTERPRETED,
            ROWS_AT_ONCE=max(1, at_once),
            SPLITS_AT_ONCE=SPLITS_AT_ONCE,
            PDL=pdl,
            **launch.options(config.warps, pdl),
        )
