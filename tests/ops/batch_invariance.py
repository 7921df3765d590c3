"""The same rows and tokens in other batches, for tests that their results are the same bits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from octavo.ops.attention import AttentionGeometry
from tests.ops.attention_batches import Rope, columns


def assert_rows_alike(
    linear: Callable[..., Tensor], x: Tensor, other: Tensor | None, parts: Sequence[tuple[int, int]]
) -> None:
    """x: [T, in], multiplied at once and in ``parts``: (number of rows, first one)."""
    whole = linear(x, None if other is None else other.clone())
    for rows, start in parts:
        part = slice(start, start + rows)
        found = linear(x[part], None if other is None else other[part].clone())
        assert len(found) == rows
        assert torch.equal(found, whole[part]), f"{rows} rows from {start}"


def attend(
    attention: Any,
    qkv: Tensor,
    qk_weight: Tensor | None,
    sizes: Sequence[int],
    mates: Tensor,
    block_size: int,
) -> tuple[Tensor, Tensor]:
    """Outputs of a row's tokens, qkv [T, (hq + 2 hkv) * d], that come in chunks of such sizes, and
    its blocks of the cache. In each step the ``mates`` [m, T, ...] bring as many tokens before."""
    geometry: AttentionGeometry = attention.geometry
    rows, length = len(mates) + 1, len(qkv)
    width = -(-length // block_size)
    order = torch.randperm(rows * width, generator=torch.Generator().manual_seed(len(sizes)))
    tables = order.int().view(rows, width)
    shape = attention.kv_shape(len(order), block_size)
    if geometry.cache_dtype is not None:  # no numbers, scales that are none
        cache = torch.full(shape, -1, dtype=torch.int8).view(geometry.cache_dtype)
    else:
        cache = torch.full(shape, float("nan"), dtype=qkv.dtype, device=qkv.device)
    rope = Rope(geometry.head_dim, length)
    found, start = [], 0
    for size in sizes:
        batch = columns([start] * rows, [size] * rows, tables, block_size, rows * (size == 1))
        state = attention.prepare(batch.to(str(qkv.device)), rope, qkv.dtype)
        part = slice(start, start + size)
        step = torch.cat((*mates[:, part], qkv[part]))
        found.append(attention(step, cache, state, qk_weight)[-size:])
        start += size
    assert start == length
    return torch.cat(found), cache[tables[-1].long().to(qkv.device)]


def assert_tokens_alike(
    attention: Any,
    qkv: Tensor,
    qk_weight: Tensor | None,
    ways: Sequence[tuple[Sequence[int], Tensor]],
    block_size: int,
) -> None:
    """``ways``: (sizes of chunks, mates) each, against all tokens at once and alone."""
    whole, cache = attend(attention, qkv, qk_weight, [len(qkv)], qkv[None][:0], block_size)
    assert whole.isfinite().all()
    for sizes, mates in ways:
        found, written = attend(attention, qkv, qk_weight, sizes, mates, block_size)
        assert torch.equal(found, whole), sizes
        assert torch.equal(written.view(torch.int16), cache.view(torch.int16)), sizes
