"""Multi-head latent attention on CPU: plain products, a few queries at a time.

Scores take 8 KB for each token of a context; the definition makes those of all queries at once.
Keys that no query of a block may see are left out.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.ops.attention import BatchColumns, Rope, token_lengths
from octavo.ops.mla import MLAGeometry, rotate_pairs
from octavo.ops.registry import register

QUERY_ROWS = 2048  # queries times heads that meet a row's keys at a time


@dataclass(slots=True)
class _State:
    batch: BatchColumns
    cos: Tensor  # FP32 [T, rope_dim / 2]
    sin: Tensor
    blocks: Tensor  # int64 [n, w]


@register("paged_latent_attention", "cpu", lambda device, dtype: device == "cpu")
class CPUPagedLatentAttention:
    """Scores, softmax and sums in FP32. Cache: [block, offset, latent + rope]."""

    def __init__(self, geometry: MLAGeometry) -> None:
        self.geometry = geometry

    def kv_shape(self, num_blocks: int, block_size: int) -> tuple[int, ...]:
        return (num_blocks, block_size, self.geometry.cache_dim)

    def prepare(self, batch: BatchColumns, rope: Rope, dtype: torch.dtype) -> _State:
        cos, sin = rope(batch.positions, token_lengths(batch))
        return _State(batch, cos, sin, batch.block_tables.long())

    def __call__(
        self, q: Tensor, kv: Tensor, cache: Tensor, state: _State, key_up: Tensor, value_up: Tensor
    ) -> Tensor:
        batch, geometry = state.batch, self.geometry
        latent, shared = kv.split((geometry.latent_dim, geometry.rope_dim), dim=1)
        shared = self._turned(shared[:, None], state)[:, 0]
        new = torch.cat((latent, shared.to(kv.dtype)), dim=1)
        cache.flatten(0, 1).index_copy_(0, batch.slot_mapping, new.to(cache.dtype))

        nope, turning = q.split((geometry.nope_dim, geometry.rope_dim), dim=2)
        absorbed = torch.bmm(nope.transpose(0, 1), key_up).transpose(0, 1)
        query = torch.cat((absorbed.float(), self._turned(turning, state)), dim=2)
        query *= geometry.scale
        mixed = query.new_empty(len(q), geometry.num_heads, geometry.latent_dim)
        for row, length in enumerate(batch.seq_lens_host):
            start, end = batch.query_starts_host[row : row + 2]
            count = -(-length // batch.block_size)
            keys = cache[state.blocks[row, :count]].flatten(0, 1)[:length].float()
            self._attend(query[start:end], keys, mixed[start:end])
        out = torch.bmm(mixed.to(q.dtype).transpose(0, 1), value_up)
        return out.transpose(0, 1).flatten(1)

    def _turned(self, x: Tensor, state: _State) -> Tensor:
        """x: [T, heads, rope_dim]. FP32."""
        return rotate_pairs(x.float(), state.cos, state.sin, self.geometry.interleaved)

    def _attend(self, query: Tensor, keys: Tensor, out: Tensor) -> None:
        """query: [q, heads, d], of the last q of ``keys``, [length, d]; out: [q, heads, latent]."""
        heads, size = query.shape[1:]
        past = len(keys) - len(query)
        step = max(1, QUERY_ROWS // heads)
        for start in range(0, len(query), step):
            part = query[start : start + step]
            seen = keys[: past + start + len(part)]
            scores = (part.reshape(-1, size) @ seen.T).view(len(part), heads, len(seen))
            if len(part) > 1:
                later = torch.ones(len(part), len(part), dtype=torch.bool).triu(1)
                scores[:, :, -len(part) :].masked_fill_(later[:, None], -torch.inf)
            weights = scores.softmax(-1).view(-1, len(seen))
            sums = weights @ seen[:, : self.geometry.latent_dim]
            out[start : start + step] = sums.view(len(part), heads, -1)
