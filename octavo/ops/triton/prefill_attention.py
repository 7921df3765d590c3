"""Flash attention over pages for rows that bring several tokens (Dao et al. 2022, 2023).

A program takes the query heads of one kv head, for as many neighbouring tokens as fill its matrix
rows: keys and values are read once for all heads that share them. Which row a program works on is
found on the device; the grid only bounds their number, so a captured graph serves any lengths.
"""

from __future__ import annotations

import triton
import triton.language as tl

from octavo.ops.triton.attention_parts import (
    LOWEST,
    capped,
    key_places,
    share_of,
    softmax_step,
    visible,
)
from octavo.ops.triton.kept import INT8, PLAIN, in_half, in_largest


@triton.jit
def _find_row(start_ptr, tile, first_row, rows, TOKENS: tl.constexpr, AT_ONCE: tl.constexpr):
    """The row that tile number ``tile`` belongs to, and its number within the row. Row i, counted
    from first_row, starts its tiles at (tokens before it) // TOKENS + i: never too few for any."""
    base = tl.load(start_ptr + first_row)
    before = tl.zeros((), tl.int32)
    for first in range(0, rows, AT_ONCE):
        i = first + tl.arange(0, AT_ONCE)
        start = tl.load(start_ptr + first_row + i, mask=i < rows, other=0) - base
        before += tl.sum(((start // TOKENS + i <= tile) & (i < rows)).to(tl.int32), 0)
    row = before - 1
    tokens = tl.load(start_ptr + first_row + row) - base
    return first_row + row, tile - tokens // TOKENS - row


@triton.jit
def _attend(
    query, cache_ptr, cache_rows, scale_ptr, table, start, end, head, positions, last, d,
    scale, inner, highest, total, acc, unit,
    KV_HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr,
    STAGES: tl.constexpr, WINDOW: tl.constexpr, MASKED: tl.constexpr, SOFTCAP: tl.constexpr,
    KIND: tl.constexpr, ASM: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Keys start .. end - 1 (``start`` a multiple of TILE). MASKED: some tokens do not see some of
    them, or the context ends within them. TMA: through cache_rows, the cache as rows of d numbers;
    only whole tiles, which lie in one block. What lies beyond the context may be another request's,
    and not finite: it is read as 0. ``unit``: with int8, of which ``acc`` is a multiple."""
    PIECE: tl.constexpr = BLOCK_SIZE * (DIM + (4 if KIND == INT8 else 0))
    for first in tl.range(start, end, TILE, num_stages=STAGES):
        if TMA:
            block = tl.load(table + first // BLOCK_SIZE)
            line = (block * KV_HEADS + head) * (2 * (PIECE // DIM)) + first % BLOCK_SIZE
            key = cache_rows.load([line, 0])
            if KIND == INT8:
                piece = (block.to(tl.int64) * KV_HEADS + head) * 2
                places = first % BLOCK_SIZE + tl.arange(0, TILE)
        else:
            piece, places = key_places(table, first, last, head, KV_HEADS, BLOCK_SIZE, TILE)
            lines = (piece * PIECE + places * DIM)[:, None]
            key = tl.load(cache_ptr + lines + d, mask=d < DIM, other=0.0)
        if KIND != PLAIN:
            key = in_half(key, KIND, ASM)
        scores = tl.dot(query, tl.trans(key))
        keys = first + tl.arange(0, TILE)
        if KIND == INT8:
            scales = scale_ptr + (piece * PIECE + BLOCK_SIZE * DIM) // 4 + places
            scores *= tl.load(scales, mask=keys <= last, other=0.0)[None, :]
        if SOFTCAP:
            scores = capped(scores, inner)
        if MASKED:
            seen = visible(keys[None, :], positions[:, None], WINDOW)
            scores = tl.where(seen, scores, float("-inf"))
        weights, shrink, highest, total = softmax_step(scores, scale, highest, total)
        if KIND == INT8:
            scales = tl.load(scales + PIECE // 4, mask=keys <= last, other=0.0)
            scales, smaller, unit = in_largest(scales, unit)
            weights *= scales[None, :]
            shrink *= smaller
        acc = acc * shrink[:, None]
        there = d < DIM
        if MASKED:
            there = there & (keys <= last)[:, None]
        if TMA:
            value = cache_rows.load([line + PIECE // DIM, 0])
        else:
            value = cache_ptr + lines + PIECE + d
            value = tl.load(value, mask=there, other=0.0)
        if KIND != PLAIN:
            value = in_half(value, KIND, ASM)
        if TMA and MASKED:
            value = tl.where(there, value, 0.0)
        acc = tl.dot(weights.to(query.dtype), value, acc)
    return highest, total, acc, unit


@triton.jit(
    do_not_specialize=["first_row", "rows", "table_stride"],
    do_not_specialize_on_alignment=["start_ptr", "length_ptr", "table_ptr"],
)
def prefill_attention_kernel(
    qkv_ptr, cache_ptr, cache_rows, scale_ptr, out_ptr, start_ptr, length_ptr, table_ptr,
    sink_ptr, first_row, rows, table_stride, scale, inner,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr, STAGES: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, SINKS: tl.constexpr, KIND: tl.constexpr,
    ASM: tl.constexpr, TMA: tl.constexpr, ALIKE: tl.constexpr,
):  # fmt: skip
    """Grid (tokens // (ROWS // group) + rows, kv heads) for batch rows first_row .. first_row +
    rows - 1; queries, keys and values are final (rope_cache_kernel).

    qkv: [T, (HEADS + 2 KV_HEADS) * DIM]. cache_rows: descriptor of the cache as rows of DIM numbers
    with blocks [TILE, DIM], if TMA. out: [T, HEADS * DIM]. start: int32 [batch rows + 1], length:
    int32 [batch rows], 0 for padding. table: int32 [batch rows, table_stride]. scale: to scores in
    units of log 2; with SOFTCAP of ``capped(scores, inner)``. sink: [HEADS] if SINKS. KIND: what
    the cache keeps (kept.py); scale_ptr: FP32, with int8 the memory of the cache, with FP8 the
    scales [2, KV_HEADS] of keys and values. ALIKE: what a token gets does not depend on which
    others share its program: all tiles of keys go through one loop, and one that a token sees
    nothing of adds zeros.
    """
    GROUP: tl.constexpr = HEADS // KV_HEADS
    TOKENS: tl.constexpr = ROWS // GROUP
    tile = tl.num_programs(0) - 1 - tl.program_id(0)  # the end of a row, which sees most, first
    head = tl.program_id(1)
    row, part = _find_row(start_ptr, tile, first_row, rows, TOKENS, 128)
    row_start = tl.load(start_ptr + row)
    count = tl.load(start_ptr + row + 1) - row_start
    length = tl.load(length_ptr + row)
    if (part * TOKENS >= count) | (length == 0):
        return

    i = tl.arange(0, ROWS)
    d = tl.arange(0, DIM_PAD)[None, :]
    token = part * TOKENS + i // GROUP
    keep = ((i < TOKENS * GROUP) & (token < count))[:, None] & (d < DIM)
    query_head = (head * GROUP + i % GROUP)[:, None]
    batch_token = (row_start + token).to(tl.int64)[:, None]
    query = qkv_ptr + (batch_token * (HEADS + 2 * KV_HEADS) + query_head) * DIM + d
    query = tl.load(query, mask=keep, other=0.0)
    query = query.to(qkv_ptr.dtype.element_ty if KIND == PLAIN else tl.float16)
    if KIND > INT8:
        if SOFTCAP:
            inner *= tl.load(scale_ptr + head)
        else:
            scale *= tl.load(scale_ptr + head)
    positions = length - count + token
    first = length - count + part * TOKENS  # position of the first token, and of the last
    last = tl.minimum(first + TOKENS, length) - 1
    low = tl.maximum(first - WINDOW + 1, 0) // TILE * TILE if WINDOW else 0
    full = low if ALIKE else (first + 1) // TILE * TILE  # keys before that are before all tokens
    table = table_ptr + row.to(tl.int64) * table_stride
    highest = tl.full((ROWS,), LOWEST, tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, DIM_PAD), tl.float32)
    unit = 1e-30
    if WINDOW and not ALIKE:  # keys that have left the window of some tokens
        inside = tl.cdiv(tl.maximum(last - WINDOW + 1, 0), TILE) * TILE
        inside = tl.minimum(inside, full)
        highest, total, acc, unit = _attend(
            query, cache_ptr, cache_rows, scale_ptr, table, low, inside, head, positions, last, d,
            scale, inner, highest, total, acc, unit,
            KV_HEADS, DIM, BLOCK_SIZE, TILE, 1, WINDOW, True, SOFTCAP, KIND, ASM, TMA,
        )  # fmt: skip
        low = inside
    if not ALIKE:
        highest, total, acc, unit = _attend(
            query, cache_ptr, cache_rows, scale_ptr, table, low, full, head, positions, last, d,
            scale, inner, highest, total, acc, unit,
            KV_HEADS, DIM, BLOCK_SIZE, TILE, STAGES, WINDOW, False, SOFTCAP, KIND, ASM, TMA,
        )  # fmt: skip
    highest, total, acc, unit = _attend(
        query, cache_ptr, cache_rows, scale_ptr, table, full, last + 1, head, positions, last, d,
        scale, inner, highest, total, acc, unit,
        KV_HEADS, DIM, BLOCK_SIZE, TILE, STAGES if ALIKE else 1, WINDOW, True, SOFTCAP, KIND, ASM,
        TMA,
    )  # fmt: skip
    to = out_ptr + (batch_token * HEADS + query_head) * DIM + d
    heads = head * GROUP + i % GROUP
    acc *= share_of(highest, total, sink_ptr, heads, i < TOKENS * GROUP, SINKS)[:, None]
    if KIND == INT8:
        acc *= unit
    elif KIND != PLAIN:
        acc *= tl.load(scale_ptr + KV_HEADS + head)
    tl.store(to, acc.to(out_ptr.dtype.element_ty), mask=keep)
