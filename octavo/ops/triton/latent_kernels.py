"""Flash attention over cached latents: of rows with one token and with several, in splits where
there are few programs (Dao et al. 2022, 2023).

All heads of a batch row see the same keys, so the heads of its tokens are the lines of one matrix,
cut into tiles of ROWS lines whatever the number of heads; a tile of keys is read once for them and
serves as keys and, in its first columns, as values. Which row a program works on, and how many
splits of its context there are, is found on the device; the grid only bounds their number.
"""

from __future__ import annotations

import triton
import triton.language as tl

from octavo.ops.triton.attention_parts import LOWEST, softmax_step


@triton.jit
def _find_row(
    start_ptr, tile, first_row, rows,
    HEADS: tl.constexpr, ROWS: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """The row that tile number ``tile`` belongs to, and its number within the row. Row i, counted
    from first_row, starts its tiles at (lines before it) // ROWS + i: never too few for any."""
    base = tl.load(start_ptr + first_row)
    before = tl.zeros((), tl.int32)
    for first in range(0, rows, AT_ONCE):
        i = first + tl.arange(0, AT_ONCE)
        start = tl.load(start_ptr + first_row + i, mask=i < rows, other=0) - base
        before += tl.sum(((start * HEADS // ROWS + i <= tile) & (i < rows)).to(tl.int32), 0)
    row = before - 1
    tokens = tl.load(start_ptr + first_row + row) - base
    return first_row + row, tile - tokens * HEADS // ROWS - row


@triton.jit
def _find_work(
    start_ptr, length_ptr, tile, first_row, rows, splits, min_tiles,
    HEADS: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr, PER_ROW: tl.constexpr,
):  # fmt: skip
    """What tile number ``tile`` of the queries is: its batch row, first line in the row, the line
    of the batch that the row starts at, lines in the row, tokens before the row's new ones, last
    key that any line sees; and the splits of its keys, of how many tiles each. No splits: nothing
    to do."""
    if PER_ROW:
        row, part = first_row + tile // PER_ROW, tile % PER_ROW
    else:
        row, part = _find_row(start_ptr, tile, first_row, rows, HEADS, ROWS, 128)
    start = tl.load(start_ptr + row)
    tokens = tl.load(start_ptr + row + 1) - start
    length = tl.load(length_ptr + row)
    line, lines = part * ROWS, tokens * HEADS
    past = length - tokens
    last = past + (tl.minimum(line + ROWS, lines) - 1) // HEADS
    tiles = last // TILE + 1
    each = tl.maximum(tl.cdiv(tiles, splits), min_tiles)
    count = tl.where((line < lines) & (length > 0), tl.cdiv(tiles, each), 0)
    return row, line, start.to(tl.int64) * HEADS, lines, past, last, count, each


@triton.jit
def _key_lines(table, first, keys, last, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr):
    """Lines of the cache, int64 [TILE, 1], with ``keys`` first .. first + TILE - 1 (``first`` a
    multiple of TILE). Beyond ``last`` they hold anything."""
    if TILE <= BLOCK_SIZE:
        block = tl.load(table + first // BLOCK_SIZE).to(tl.int64)
        lines = block * BLOCK_SIZE + first % BLOCK_SIZE + tl.arange(0, TILE)
    else:
        block = tl.load(table + tl.minimum(keys, last) // BLOCK_SIZE).to(tl.int64)
        lines = block * BLOCK_SIZE + keys % BLOCK_SIZE
    return lines[:, None]


@triton.jit(
    do_not_specialize=["first_row", "rows", "table_stride", "splits", "min_tiles"],
    do_not_specialize_on_alignment=["start_ptr", "length_ptr", "table_ptr"],
)
def latent_attention_kernel(
    query_ptr, cache_ptr, mixed_ptr, partial_ptr, state_ptr, start_ptr, length_ptr, table_ptr,
    first_row, rows, table_stride, splits, min_tiles, scale,
    HEADS: tl.constexpr, LATENT: tl.constexpr, LATENT_PAD: tl.constexpr, ROPE: tl.constexpr,
    ROPE_PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr,
    STAGES: tl.constexpr, PER_ROW: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of queries, splits) for batch rows first_row .. first_row + rows - 1. PER_ROW:
    tiles of each row where all bring equally many tokens; 0: they bring any number, and there are
    (their lines) // ROWS + rows tiles. A split takes min_tiles tiles of keys at least.

    query: [T, HEADS, LATENT + ROPE], keys of latents absorbed, RoPE done. cache: [block,
    BLOCK_SIZE, LATENT + ROPE]. mixed: [T, HEADS, LATENT], written where a context has one split.
    partial: FP32 [tiles, splits, ROWS, LATENT_PAD] and state: FP32 [tiles, splits, 2, ROWS],
    maximum and sum, for the others (latent_merge_kernel). start: int32 [batch rows + 1]. length:
    int32 [batch rows], 0 for padding. table: int32 [batch rows, table_stride]. scale: to scores in
    units of log 2.
    """
    tile, split = tl.program_id(0), tl.program_id(1)
    if PER_ROW == 0:
        tile = tl.num_programs(0) - 1 - tile  # the end of a row, which sees most, first
    row, line, start, lines, past, last, count, each = _find_work(
        start_ptr, length_ptr, tile, first_row, rows, splits, min_tiles, HEADS, ROWS, TILE, PER_ROW
    )
    if split >= count:
        return
    WIDTH: tl.constexpr = LATENT + ROPE
    i = tl.arange(0, ROWS)
    d = tl.arange(0, LATENT_PAD)[None, :]
    e = tl.arange(0, ROPE_PAD)[None, :]
    keep = (line + i < lines)[:, None]
    position = past + (line + i) // HEADS
    at = (start + line + i)[:, None]
    query = query_ptr + at * WIDTH
    latent_query = tl.load(query + d, mask=keep & (d < LATENT), other=0.0)
    rope_query = tl.load(query + LATENT + e, mask=keep & (e < ROPE), other=0.0)
    table = table_ptr + row.to(tl.int64) * table_stride
    highest = tl.full((ROWS,), LOWEST, tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, LATENT_PAD), tl.float32)
    begin = split * each * TILE
    end = tl.minimum(begin + each * TILE, last + 1)
    for first in tl.range(begin, end, TILE, num_stages=STAGES):
        keys = first + tl.arange(0, TILE)
        cached = cache_ptr + _key_lines(table, first, keys, last, BLOCK_SIZE, TILE) * WIDTH
        # What lies beyond the context may be another request's, and not finite.
        there = (keys <= last)[:, None]
        latent = tl.load(cached + d, mask=there & (d < LATENT), other=0.0)
        shared = tl.load(cached + LATENT + e, mask=there & (e < ROPE), other=0.0)
        scores = tl.dot(latent_query, tl.trans(latent), tl.dot(rope_query, tl.trans(shared)))
        scores = tl.where(keys[None, :] <= position[:, None], scores, float("-inf"))
        weights, shrink, highest, total = softmax_step(scores, scale, highest, total)
        acc = tl.dot(weights.to(latent.dtype), latent, acc * shrink[:, None])

    if count == 1:
        acc = acc / tl.maximum(total, 1e-30)[:, None]
        to = mixed_ptr + at * LATENT + d
        tl.store(to, acc.to(mixed_ptr.dtype.element_ty), mask=keep & (d < LATENT))
    else:
        part = tile.to(tl.int64) * splits + split
        tl.store(partial_ptr + (part * ROWS + i)[:, None] * LATENT_PAD + d, acc, mask=keep)
        tl.store(state_ptr + part * (2 * ROWS) + i, highest)
        tl.store(state_ptr + part * (2 * ROWS) + ROWS + i, total)


@triton.jit(
    do_not_specialize=["first_row", "rows", "splits", "min_tiles"],
    do_not_specialize_on_alignment=["start_ptr", "length_ptr"],
)
def latent_merge_kernel(
    mixed_ptr, partial_ptr, state_ptr, start_ptr, length_ptr, first_row, rows, splits,
    min_tiles,
    HEADS: tl.constexpr, LATENT: tl.constexpr, LATENT_PAD: tl.constexpr, ROWS: tl.constexpr,
    TILE: tl.constexpr, PER_ROW: tl.constexpr, SPLITS_AT_ONCE: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of queries, ROWS): one line, whose splits are added up in one order. Arguments as
    those of latent_attention_kernel, which has run."""
    tile, i = tl.program_id(0), tl.program_id(1)
    _, line, start, lines, _, _, count, _ = _find_work(
        start_ptr, length_ptr, tile, first_row, rows, splits, min_tiles, HEADS, ROWS, TILE, PER_ROW
    )
    if (count <= 1) | (line + i >= lines):
        return
    d = tl.arange(0, LATENT_PAD)
    highest = tl.full((), LOWEST, tl.float32)
    total = tl.zeros((), tl.float32)
    acc = tl.zeros((LATENT_PAD,), tl.float32)
    for first in range(0, count, SPLITS_AT_ONCE):
        split = first + tl.arange(0, SPLITS_AT_ONCE)
        there = split < count
        part = tile.to(tl.int64) * splits + split
        top = tl.load(state_ptr + part * (2 * ROWS) + i, mask=there, other=LOWEST)
        sums = tl.load(state_ptr + part * (2 * ROWS) + ROWS + i, mask=there, other=0.0)
        values = partial_ptr + (part * ROWS + i)[:, None] * LATENT_PAD + d[None, :]
        values = tl.load(values, mask=there[:, None], other=0.0)
        new = tl.maximum(highest, tl.max(top, 0))
        shrink = tl.exp2(highest - new)
        weights = tl.exp2(top - new)
        total = total * shrink + tl.sum(weights * sums, 0)
        acc = acc * shrink + tl.sum(values * weights[:, None], 0)
        highest = new
    to = mixed_ptr + (start + line + i) * LATENT + d
    acc = acc / tl.maximum(total, 1e-30)
    tl.store(to, acc.to(mixed_ptr.dtype.element_ty), mask=d < LATENT)
