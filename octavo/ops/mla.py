"""Multi-head latent attention over a paged cache: the interface, and the definition.

Keys and values of all heads of a token are projections of one short vector, its latent, beside one
rotated key that the heads share; the cache holds these two (DeepSeek-V2, 2024, section 2.1). The
up-projections are absorbed: that of the keys into the query, that of the values into the output, so
attention is that of many query heads over one key head, whose values are the keys' first columns.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from octavo.ops.attention import BatchColumns, Rope, rotate, token_lengths
from octavo.ops.registry import register


@dataclass(frozen=True)
class MLAGeometry:
    """``latent_dim``: of the compressed keys and values (kv_lora_rank). ``nope_dim``, ``rope_dim``:
    the parts of a query head without and with RoPE. ``value_dim``: of a head's output. ``scale``:
    of the scores. ``interleaved``: RoPE turns pairs (2i, 2i + 1), else (i, i + rope_dim / 2)."""

    num_heads: int
    latent_dim: int
    rope_dim: int
    nope_dim: int
    value_dim: int
    scale: float
    interleaved: bool = False

    @property
    def query_dim(self) -> int:
        return self.nope_dim + self.rope_dim

    @property
    def cache_dim(self) -> int:
        """Numbers that the cache holds of a token."""
        return self.latent_dim + self.rope_dim


class PagedLatentAttention(Protocol):
    geometry: MLAGeometry

    def kv_shape(self, num_blocks: int, block_size: int) -> tuple[int, ...]:
        """Shape of one layer's cache; axis 0 is the block."""

    def prepare(self, batch: BatchColumns, rope: Rope, dtype: torch.dtype) -> Any:
        """The step's state, shared by all layers of this geometry. rope: of ``rope_dim``."""

    def __call__(
        self, q: Tensor, kv: Tensor, cache: Tensor, state: Any, key_up: Tensor, value_up: Tensor
    ) -> Tensor:
        """q: [T, heads, nope + rope], before RoPE. kv: [T, latent + rope], the latent normed, the
        shared key before RoPE. cache: ``kv_shape``, of q's dtype, written in place: the latent,
        then the rotated key. key_up: [heads, nope, latent], value_up: [heads, latent, value].
        Returns [T, heads * value]. Raises ValueError for what a version does not do."""


def rotate_pairs(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """x: [m, heads, d]; cos, sin: [m, d / 2]. The pairs stay where they are."""
    if not interleaved:
        return rotate(x, cos, sin)
    apart = torch.cat((x[..., ::2], x[..., 1::2]), dim=-1)
    return torch.stack(rotate(apart, cos, sin).chunk(2, dim=-1), dim=-1).flatten(-2)


@register("paged_latent_attention", "torch")
class TorchPagedLatentAttention:
    """The definition: row by row, in FP32 at least. Cache: [block, offset, latent + rope]."""

    def __init__(self, geometry: MLAGeometry) -> None:
        self.geometry = geometry

    def kv_shape(self, num_blocks: int, block_size: int) -> tuple[int, ...]:
        return (num_blocks, block_size, self.geometry.cache_dim)

    def prepare(
        self, batch: BatchColumns, rope: Rope, dtype: torch.dtype
    ) -> tuple[BatchColumns, Rope]:
        return batch, rope

    def __call__(
        self,
        q: Tensor,
        kv: Tensor,
        cache: Tensor,
        state: tuple[BatchColumns, Rope],
        key_up: Tensor,
        value_up: Tensor,
    ) -> Tensor:
        batch, rope = state
        geometry = self.geometry
        dtype = torch.promote_types(q.dtype, torch.float32)
        cos, sin = (t.to(dtype) for t in rope(batch.positions, token_lengths(batch)))
        latent, shared = kv.to(dtype).split((geometry.latent_dim, geometry.rope_dim), dim=1)
        shared = rotate_pairs(shared[:, None], cos, sin, geometry.interleaved)[:, 0]
        slots = cache.flatten(0, 1)  # [slots, latent + rope]
        slots[batch.slot_mapping] = torch.cat((latent, shared), dim=1).to(cache.dtype)
        nope, turned = q.to(dtype).split((geometry.nope_dim, geometry.rope_dim), dim=2)
        turned = rotate_pairs(turned, cos, sin, geometry.interleaved)
        query = torch.cat((torch.einsum("qhn,hnr->qhr", nope, key_up.to(dtype)), turned), dim=2)

        mixed = query.new_empty(len(q), geometry.num_heads, geometry.latent_dim)
        for row, length in enumerate(batch.seq_lens_host):
            start, end = batch.query_starts_host[row : row + 2]
            past = torch.arange(length)
            blocks = batch.block_tables[row].long()[past // batch.block_size]
            keys = slots[blocks * batch.block_size + past % batch.block_size].to(dtype)
            scores = torch.einsum("qhd,kd->hqk", query[start:end], keys) * geometry.scale
            hidden = batch.positions[start:end, None] < past[None, :]
            weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
            values = keys[:, : geometry.latent_dim]
            mixed[start:end] = torch.einsum("hqk,kr->qhr", weights, values)
        return torch.einsum("qhr,hrv->qhv", mixed, value_up.to(dtype)).to(q.dtype).flatten(1)
