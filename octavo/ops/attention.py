"""Paged attention over a mixed batch: the interface, and the definition.

One operation takes the packed qkv projection and does q/k norm, RoPE, cache write and attention,
so that a backend can fuse what it likes. A version is a class made once per geometry; the layout of
the cache belongs to it (``kv_shape``), and ``prepare`` does once per step what all layers share.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from octavo.ops.norm import rms_norm
from octavo.ops.registry import register


class Rope(Protocol):
    """Rotary angles (model.rope.Rope)."""

    max_position: int  # positions 0 .. max_position - 1 occur

    def __call__(self, positions: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """positions [m], lengths of their rows' contexts [m]: cos and sin, FP32 [m, head_dim / 2]
        each, on the device of ``positions``."""

    def table(self, length: int, device: torch.device) -> Tensor | None:
        """cos, then sin of the first ``length`` positions, FP32 [length, head_dim], made once per
        device; None where they depend on the context's length too."""


@dataclass(frozen=True)
class AttentionGeometry:
    """``window``: keys a token sees, itself included. ``qk_norm_eps``: q and k heads are RMS-normed
    before RoPE. ``softcap``: scores s become softcap * tanh(s / softcap). ``own_scale``: of the
    scores, where it is not 1 / sqrt(head_dim). ``sinks``: calls bring some. ``cache_dtype``: what
    keys and values are kept in, None: as they come. E4M3 and E5M2 (``torch.float8_e4m3fn``,
    ``torch.float8_e5m2``): times the scale of their kv head; int8: each head of a token's key and
    value as whole multiples of its max |x| / 127."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    window: int | None = None
    qk_norm_eps: float | None = None
    softcap: float | None = None
    own_scale: float | None = None
    sinks: bool = False
    cache_dtype: torch.dtype | None = None

    @property
    def scale(self) -> float:
        return 1 / math.sqrt(self.head_dim) if self.own_scale is None else self.own_scale


class BatchColumns(Protocol):
    """What attention reads of a batch of n rows and T tokens (model.batch.ForwardBatch)."""

    positions: Tensor  # int64 [T]
    slot_mapping: Tensor  # int64 [T] block * block_size + offset
    query_starts: Tensor  # int32 [n + 1]
    seq_lens: Tensor  # int32 [n], with this step's tokens
    query_starts_host: list[int]  # the same two on the host, for CPU versions
    seq_lens_host: list[int]
    block_tables: Tensor  # int32 [n, w]
    block_size: int
    decode_rows: int  # the first so many rows bring one token each
    queries: int  # more than 1: each row brings just so many, and decode_rows is 0


class PagedAttention(Protocol):
    geometry: AttentionGeometry

    def kv_shape(self, num_blocks: int, block_size: int) -> tuple[int, ...]:
        """Shape of one layer's cache; axis 0 is the block."""

    def prepare(self, batch: BatchColumns, rope: Rope, dtype: torch.dtype) -> Any:
        """The step's state, shared by all layers of this geometry."""

    def __call__(
        self,
        qkv: Tensor,
        cache: Tensor,
        state: Any,
        qk_weight: Tensor | None = None,
        sinks: Tensor | None = None,
        kv_scales: Tensor | None = None,
    ) -> Tensor:
        """qkv: [T, (hq + 2 hkv) * d], q heads, then k heads, then v heads; may be overwritten.
        cache: ``kv_shape``, written in place; of the geometry's ``cache_dtype``, else qkv's dtype.
        qk_weight: [hq + hkv, d]. sinks: [hq], for each head one more score, of nothing (gpt-oss).
        kv_scales: FP32 [2, hkv], positive, of keys and of values kept in FP8; None: all 1. Returns
        [T, hq * d]. Raises ValueError for what a version does not do."""


def token_lengths(batch: BatchColumns) -> Tensor:
    """Context length of each token's row, int64 [T]."""
    counts = torch.tensor(batch.query_starts_host).diff()
    return torch.tensor(batch.seq_lens_host).repeat_interleave(counts)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x: [m, heads, d]; cos, sin: [m, d / 2]. Pairs (i, i + d/2) turn by their angle (Su 2021)."""
    first, second = x.chunk(2, dim=-1)
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def kept(x: Tensor, dtype: torch.dtype | None, scales: Tensor | None) -> Tensor:
    """x: [T, heads, d]. The numbers that a cache of ``dtype`` (``AttentionGeometry``) keeps in
    their place; scales: [heads], of FP8, whose largest number stands for all beyond."""
    if dtype is None:
        return x
    if dtype == torch.int8:
        step = x.abs().amax(dim=-1, keepdim=True) / 127
        return (x / step.masked_fill(step == 0, 1)).round() * step
    scale = x.new_ones(1) if scales is None else scales.to(x.dtype)[:, None]
    largest = torch.finfo(dtype).max
    return (x / scale).clamp(-largest, largest).to(dtype).to(x.dtype) * scale


@register("paged_attention", "torch")
class TorchPagedAttention:
    """The definition: row by row, in FP32 at least. Cache: [block, offset, k|v, head, d], of what
    the numbers that are kept stand for, so of qkv's dtype whatever that is."""

    def __init__(self, geometry: AttentionGeometry) -> None:
        self.geometry = geometry

    def kv_shape(self, num_blocks: int, block_size: int) -> tuple[int, ...]:
        return (num_blocks, block_size, 2, self.geometry.num_kv_heads, self.geometry.head_dim)

    def prepare(
        self, batch: BatchColumns, rope: Rope, dtype: torch.dtype
    ) -> tuple[BatchColumns, Rope]:
        return batch, rope

    def __call__(
        self,
        qkv: Tensor,
        cache: Tensor,
        state: tuple[BatchColumns, Rope],
        qk_weight: Tensor | None = None,
        sinks: Tensor | None = None,
        kv_scales: Tensor | None = None,
    ) -> Tensor:
        batch, rope = state
        geometry = self.geometry
        heads, kv_heads, dim = geometry.num_heads, geometry.num_kv_heads, geometry.head_dim
        wide = qkv.to(torch.promote_types(qkv.dtype, torch.float32)).view(len(qkv), -1, dim)
        qk, value = wide.split((heads + kv_heads, kv_heads), dim=1)
        if qk_weight is not None:
            qk = rms_norm(qk, qk_weight, geometry.qk_norm_eps or 0.0)
        cos, sin = (t.to(wide.dtype) for t in rope(batch.positions, token_lengths(batch)))
        query, key = qk.split((heads, kv_heads), dim=1)
        query, key = rotate(query, cos, sin), rotate(key, cos, sin)
        scales = (None, None) if kv_scales is None else kv_scales.unbind()
        new = [kept(x, geometry.cache_dtype, some) for x, some in zip((key, value), scales)]
        slots = cache.flatten(0, 1)  # [slots, k|v, head, d]
        slots[batch.slot_mapping] = torch.stack(new, dim=1).to(cache.dtype)

        out = torch.empty_like(query)
        for row, length in enumerate(batch.seq_lens_host):
            start, end = batch.query_starts_host[row : row + 2]
            past = torch.arange(length)
            blocks = batch.block_tables[row].long()[past // batch.block_size]
            known = slots[blocks * batch.block_size + past % batch.block_size].to(wide.dtype)
            keys, values = known.unbind(1)  # [length, kv_heads, d]
            group = heads // kv_heads
            keys, values = (t.repeat_interleave(group, dim=1) for t in (keys, values))
            scores = torch.einsum("qhd,khd->hqk", query[start:end], keys) * geometry.scale
            if geometry.softcap is not None:
                scores = geometry.softcap * torch.tanh(scores / geometry.softcap)
            distance = batch.positions[start:end, None] - past[None, :]
            hidden = distance < 0
            if geometry.window is not None:
                hidden = hidden | (distance >= geometry.window)
            scores = scores.masked_fill(hidden, float("-inf"))
            if sinks is not None:
                sink = sinks.to(wide.dtype)[:, None, None].expand(-1, end - start, 1)
                scores = torch.cat((scores, sink), dim=-1)
            weights = scores.softmax(-1)[..., :length]
            out[start:end] = torch.einsum("hqk,khd->qhd", weights, values)
        return out.to(qkv.dtype).flatten(1)


@register("copy_blocks", "torch", batch_invariant="yes")
def copy_blocks(caches: Sequence[Tensor], pairs: Tensor) -> None:
    """Copies blocks in every layer's cache, in place.

    caches: any ``kv_shape`` each; pairs: int64 [c, 2] of source and destination blocks. No block is
    both a source and a destination, and none a destination twice, so the order does not matter: a
    block freed or forked in a plan is never the destination of a copy in it.
    """
    source, target = pairs.unbind(1)
    for cache in caches:
        if cache.itemsize == 1:
            cache = cache.view(torch.uint8)  # torch copies no blocks of FP8
        cache.index_copy_(0, target, cache.index_select(0, source))
