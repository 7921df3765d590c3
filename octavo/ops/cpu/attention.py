"""Paged attention on CPU: gathers only the blocks of the rows at hand, then batched matmuls.

Cache: [block, k|v, kv head, offset, d], so that (block, k|v, head) is one contiguous piece and a
gather of pieces gives [k|v, row, head, context, d] with every matrix contiguous.
Query heads that share a kv head are folded into the rows of one matrix. Decode rows run batched,
in groups of like context length; the others one by one, in blocks of queries that only meet the
keys they may see.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.ops.attention import AttentionGeometry, BatchColumns, Rope, token_lengths
from octavo.ops.registry import register

QUERY_BLOCK = 128  # queries of a long row handled at a time
GROUP_WASTE = 1024  # padded cache places that cost about as much as one more group
GROUP_PLACES = 16384  # most places gathered at once for several rows: bounds the scratch memory
FLASH_PLACES = 512  # rows x places up to which one flash call beats two batched matmuls


@dataclass(slots=True)
class _Keys:
    """Where m rows' keys and values are: pieces [2 * m * kv_heads * blocks] of the cache seen as
    [pieces, block_size * d]."""

    pieces: Tensor
    rows: int


@dataclass(slots=True)
class _Group:
    """Decode rows with contexts of like length. ``index``: their token rows, None for rows
    0 .. m - 1. ``mask``: [m, 1, 1, places] if ``flash`` else [m * kv_heads, 1, places], 0 or -inf;
    None where ``places`` all count."""

    index: Tensor | None
    keys: _Keys
    places: int
    flash: bool
    mask: Tensor | None


@dataclass(slots=True)
class _QueryBlock:
    """Queries start .. end (token rows) meet keys low .. high of their row. ``mask``:
    [group * queries, m], covers the last m of these keys; the others are all seen."""

    start: int
    end: int
    low: int
    high: int
    mask: Tensor


@dataclass(slots=True)
class _Row:
    """``keys`` None: the row starts its context, so its keys are this step's own."""

    start: int
    end: int
    keys: _Keys | None
    blocks: list[_QueryBlock]


@dataclass(slots=True)
class _State:
    cos: Tensor  # [T, 1, d]
    sin: Tensor  # [T, 1, d], first half negated
    write: Tensor  # [T * 2 * kv_heads] rows of the cache seen as [.., d]
    groups: list[_Group]
    rows: list[_Row]
    decode_rows: int


def _full_tables(rope: Rope, positions: Tensor, lengths: Tensor, dtype: torch.dtype) -> Any:
    cos, sin = rope(positions, lengths)
    return torch.cat((cos, cos), -1).to(dtype), torch.cat((-sin, sin), -1).to(dtype)


def _rotate_(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    turned = x.roll(x.shape[-1] // 2, -1).mul_(sin)
    torch.addcmul(turned, x, cos, out=x)


@register("paged_attention", "cpu", lambda device, dtype: device == "cpu", tolerance=8.0)
class CPUPagedAttention:
    flash_prompts = False  # prompts from position 0 through ATen's flash kernel

    def __init__(self, geometry: AttentionGeometry) -> None:
        if geometry.cache_dtype is not None:
            raise ValueError("a cache of 8 bits is read by octavo's own kernels alone")
        if geometry.sinks:
            raise ValueError("attention sinks are not written in ATen's operations")
        self.geometry = geometry
        self._flash = geometry.softcap is None  # ATen's flash kernel has no soft cap
        self._group = geometry.num_heads // geometry.num_kv_heads
        self._masks: dict[tuple[int, torch.dtype], Tensor] = {}
        self._scratch = torch.empty(0)  # gathered keys and values of one group or row

    def kv_shape(self, num_blocks: int, block_size: int) -> tuple[int, ...]:
        return (num_blocks, 2, self.geometry.num_kv_heads, block_size, self.geometry.head_dim)

    # ---- once per step ----

    def prepare(self, batch: BatchColumns, rope: Rope, dtype: torch.dtype) -> _State:
        lengths = token_lengths(batch)
        cos, sin = _full_tables(rope, batch.positions, lengths, dtype)
        block = batch.slot_mapping // batch.block_size
        offset = batch.slot_mapping % batch.block_size
        kinds = torch.arange(2 * self.geometry.num_kv_heads)
        pieces = block[:, None] * len(kinds) + kinds
        return _State(
            cos.unsqueeze(1),
            sin.unsqueeze(1),
            (pieces * batch.block_size + offset[:, None]).flatten(),
            self._groups(batch, dtype),
            [
                self._row(batch, row, dtype)
                for row in range(batch.decode_rows, len(batch.seq_lens_host))
            ],
            batch.decode_rows,
        )

    def _first_block(self, position: int, block_size: int) -> int:
        """First block that a query at ``position`` sees."""
        window = self.geometry.window
        return 0 if window is None else max(0, position - window + 1) // block_size

    def _groups(self, batch: BatchColumns, dtype: torch.dtype) -> list[_Group]:
        size, count = batch.block_size, batch.decode_rows
        if not count:
            return []
        lengths = batch.seq_lens_host[:count]
        firsts = [self._first_block(length - 1, size) for length in lengths]
        widths = [-(-length // size) - first for length, first in zip(lengths, firsts)]
        order = sorted(range(count), key=lambda row: -widths[row])
        cuts = [0]
        for i in range(1, count):
            widest = widths[order[cuts[-1]]]
            wasted = (widest - widths[order[i]]) * size * (count - i)
            if wasted > GROUP_WASTE or (i - cuts[-1] + 1) * widest * size > GROUP_PLACES:
                cuts.append(i)
        groups = []
        for low, high in zip(cuts, [*cuts[1:], count]):
            rows = order[low:high] if len(cuts) > 1 else list(range(count))
            groups.append(
                self._decode_group(
                    batch,
                    rows,
                    [firsts[r] for r in rows],
                    max(widths[r] for r in rows),
                    dtype,
                )
            )
        return groups

    def _decode_group(
        self,
        batch: BatchColumns,
        rows: list[int],
        firsts: list[int],
        width: int,
        dtype: torch.dtype,
    ) -> _Group:
        index = None if rows == list(range(batch.decode_rows)) else torch.tensor(rows)
        keys = self._keys(batch, rows, firsts, width)
        lengths = [batch.seq_lens_host[row] for row in rows]
        if len(rows) == 1 and self.geometry.window is None:
            flash = self._flash and lengths[0] <= FLASH_PLACES
            return _Group(index, keys, lengths[0], flash, None)
        places = width * batch.block_size
        flash = self._flash and len(rows) * places <= FLASH_PLACES
        position = torch.tensor(firsts)[:, None] * batch.block_size + torch.arange(places)
        last = torch.tensor(lengths)[:, None] - 1
        hidden = position > last
        if self.geometry.window is not None:
            hidden |= position <= last - self.geometry.window
        mask = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, float("-inf"))
        if flash:
            mask = mask[:, None, None]
        else:
            mask = mask.repeat_interleave(self.geometry.num_kv_heads, dim=0).unsqueeze(1)
        return _Group(index, keys, places, flash, mask)

    def _keys(self, batch: BatchColumns, rows: list[int], firsts: list[int], width: int) -> _Keys:
        """``width`` blocks of each row from its block ``firsts`` on; past a row's end any block
        stands in (its places are masked)."""
        table = batch.block_tables[torch.tensor(rows)].long()
        columns = torch.tensor(firsts)[:, None] + torch.arange(width)
        blocks = table.gather(1, columns.clamp_(max=table.shape[1] - 1)).clamp_(min=0)
        kv_heads = self.geometry.num_kv_heads
        kind = torch.arange(2)[:, None, None, None]
        head = torch.arange(kv_heads)[None, None, :, None]
        pieces = (blocks[None, :, None, :] * 2 + kind) * kv_heads + head
        return _Keys(pieces.flatten(), len(rows))

    def _row(self, batch: BatchColumns, row: int, dtype: torch.dtype) -> _Row:
        start, end = batch.query_starts_host[row : row + 2]
        length = batch.seq_lens_host[row]
        past = length - (end - start)
        first = self._first_block(past, batch.block_size) if past else 0
        base = first * batch.block_size  # position of key 0
        width = -(-length // batch.block_size) - first
        keys = self._keys(batch, [row], [first], width) if past else None
        blocks = []
        for query in range(start, end, QUERY_BLOCK):
            stop = min(query + QUERY_BLOCK, end)
            position = past + query - start
            window = self.geometry.window
            low = 0 if window is None else max(0, position - window + 1 - base)
            high = past + stop - start - base
            count = stop - query
            mask = self._causal(count, dtype)
            if window is not None and high - low > count:
                mask = self._banded(count, high - low, window, dtype)
            blocks.append(_QueryBlock(query, stop, low, high, mask))
        return _Row(start, end, keys, blocks)

    def _causal(self, count: int, dtype: torch.dtype) -> Tensor:
        """[group * count, count]: query i sees keys up to i. Kept: few sizes occur."""
        mask = self._masks.get((count, dtype))
        if mask is None:
            mask = self._banded(count, count, self.geometry.window, dtype)
            self._masks[(count, dtype)] = mask
        return mask

    def _banded(self, count: int, width: int, window: int | None, dtype: torch.dtype) -> Tensor:
        """Queries are the last ``count`` of ``width`` positions."""
        distance = torch.arange(width - count, width)[:, None] - torch.arange(width)
        hidden = distance < 0
        if window is not None:
            hidden |= distance >= window
        mask = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, float("-inf"))
        return mask.repeat(self._group, 1)

    # ---- once per layer ----

    def __call__(
        self,
        qkv: Tensor,
        cache: Tensor,
        state: _State,
        qk_weight: Tensor | None = None,
        sinks: Tensor | None = None,
        kv_scales: Tensor | None = None,
    ) -> Tensor:
        if sinks is not None or cache.dtype != qkv.dtype:
            raise ValueError("attention sinks and caches of 8 bits are not written in torch")
        geometry = self.geometry
        dim, kv_heads = geometry.head_dim, geometry.num_kv_heads
        heads = qkv.view(len(qkv), -1, dim)
        rotary = heads[:, : geometry.num_heads + kv_heads]
        if qk_weight is not None:
            normed = F.rms_norm(rotary, (dim,), None, geometry.qk_norm_eps)
            torch.mul(normed, qk_weight, out=rotary)
        _rotate_(rotary, state.cos, state.sin)
        fresh = heads[:, geometry.num_heads :].reshape(-1, dim)
        cache.view(-1, dim).index_copy_(0, state.write, fresh)

        width = geometry.num_heads * dim
        query = qkv[:, :width]
        out = torch.empty_like(query)
        for group in state.groups:
            self._attend_group(query, cache, group, state.decode_rows, out)
        for row in state.rows:
            self._attend_row(heads, cache, row, out)
        return out

    def _gather(self, cache: Tensor, keys: _Keys) -> tuple[Tensor, Tensor]:
        """Keys and values, each [rows * kv_heads, places, d]."""
        dim = self.geometry.head_dim
        width = cache.shape[-2] * dim
        count = len(keys.pieces)
        if self._scratch.numel() < count * width or self._scratch.dtype != cache.dtype:
            self._scratch = cache.new_empty(count * width)
        found = self._scratch[: count * width].view(count, width)
        torch.index_select(cache.view(-1, width), 0, keys.pieces, out=found)
        key, value = found.view(2, keys.rows * self.geometry.num_kv_heads, -1, dim).unbind(0)
        return key, value

    def _attend_group(
        self, query: Tensor, cache: Tensor, group: _Group, decode_rows: int, out: Tensor
    ) -> None:
        rows, kv_heads, dim = group.keys.rows, self.geometry.num_kv_heads, self.geometry.head_dim
        key, value = (t[:, : group.places] for t in self._gather(cache, group.keys))
        mine = query[:decode_rows] if group.index is None else query.index_select(0, group.index)
        if group.flash:
            found = F.scaled_dot_product_attention(
                mine.view(rows, kv_heads, self._group, dim),
                key.view(rows, kv_heads, group.places, dim),
                value.view(rows, kv_heads, group.places, dim),
                group.mask,
                scale=self.geometry.scale,
            )
        else:
            mine = mine.reshape(rows * kv_heads, self._group, dim)
            found = torch.bmm(self._scores(mine, key, group.mask).softmax(-1), value)
        found = found.reshape(rows, -1)
        if group.index is None:
            out[:decode_rows] = found
        else:
            out.index_copy_(0, group.index, found)

    def _scores(self, query: Tensor, key: Tensor, mask: Tensor | None = None) -> Tensor:
        """query [m, i, d], key [m, j, d] -> scale * query @ key.T, capped, + mask, [m, i, j]."""
        cap, scale = self.geometry.softcap, self.geometry.scale
        if cap is None and mask is not None:
            return torch.baddbmm(mask, query, key.transpose(1, 2), alpha=scale)
        unused = query.new_zeros(1)
        scores = torch.baddbmm(unused, query, key.transpose(1, 2), beta=0, alpha=scale)
        if cap is not None:
            scores = scores.div_(cap).tanh_().mul_(cap)
        return scores if mask is None else scores.add_(mask)

    def _attend_row(self, heads: Tensor, cache: Tensor, row: _Row, out: Tensor) -> None:
        hq, kv_heads, dim = (
            self.geometry.num_heads,
            self.geometry.num_kv_heads,
            self.geometry.head_dim,
        )
        if row.keys is None:
            own = heads[row.start : row.end, hq:].transpose(0, 1).contiguous()
            key, value = own.split(kv_heads)
            if self._flash and self.flash_prompts and self.geometry.window is None:
                self._attend_prompt(heads[row.start : row.end, :hq], key, value, out, row)
                return
        else:
            key, value = self._gather(cache, row.keys)
        for block in row.blocks:
            count = block.end - block.start
            query = heads[block.start : block.end, :hq].view(count, kv_heads, self._group, dim)
            query = query.permute(1, 2, 0, 3).reshape(kv_heads, self._group * count, dim)
            scores = self._scores(query, key[:, block.low : block.high])
            scores[:, :, -block.mask.shape[1] :] += block.mask
            found = torch.bmm(scores.softmax(-1), value[:, block.low : block.high])
            target = out[block.start : block.end].view(count, kv_heads, self._group, dim)
            target.copy_(found.view(kv_heads, self._group, count, dim).permute(2, 0, 1, 3))

    def _attend_prompt(
        self, query: Tensor, key: Tensor, value: Tensor, out: Tensor, row: _Row
    ) -> None:
        """query: [T, heads, d]; key, value: [kv_heads, T, d], all of the row's tokens."""
        found = F.scaled_dot_product_attention(
            query.transpose(0, 1)[None],
            key[None],
            value[None],
            is_causal=True,
            scale=self.geometry.scale,
            enable_gqa=True,
        )
        out[row.start : row.end].view(query.shape).copy_(found[0].transpose(0, 1))


def _has_amx(device: str, dtype: torch.dtype) -> bool:
    return device == "cpu" and dtype == torch.bfloat16 and torch.cpu._is_amx_tile_supported()


@register("paged_attention", "cpu-amx", _has_amx, tolerance=8.0)
class AMXPagedAttention(CPUPagedAttention):
    """With AMX the flash kernel takes half the time of the products in blocks (5.1 against 7.9 ms
    for 1,024 tokens of 9 heads); without it, nearly twice the time (12 against 6.6 ms)."""

    flash_prompts = True
