"""Attention of rows with one new token in one kernel: q/k norm, RoPE, the cache write, and flash
decoding over splits of the context (Dao et al. 2023), merged by the last split to finish.

Programs are small, one or two warps over 32 keys at a time: no softmax across many warps, several
programs on a multiprocessor, short contexts do not wait for long ones. The number of splits of a
row is found on the device from its length and the grid only bounds it, so a captured graph serves
every length.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from octavo.ops.triton.attention_parts import (
    LOWEST,
    capped,
    key_places,
    share_of,
    softmax_step,
    visible,
)
from octavo.ops.triton.kept import (
    E4M3,
    INT8,
    PLAIN,
    halves_of,
    in_half,
    in_largest,
    int8_codes,
    int8_scale,
)


@triton.jit
def _load_head(
    token_ptr, weight_ptr, heads, cos, sin, keep, eps,
    DIM: tl.constexpr, DIM_PAD: tl.constexpr, QK_NORM: tl.constexpr,
):  # fmt: skip
    """A token's ``heads`` [m, 1] after norm and RoPE, FP32 [m, DIM_PAD]. cos, sin: [1, DIM_PAD],
    sin negated in the first half. keep: [m, DIM_PAD]."""
    d = heads * DIM + tl.arange(0, DIM_PAD)[None, :]
    partner = heads * DIM + (tl.arange(0, DIM_PAD)[None, :] + DIM // 2) % DIM
    x = tl.load(token_ptr + d, mask=keep, other=0.0).to(tl.float32)
    y = tl.load(token_ptr + partner, mask=keep, other=0.0).to(tl.float32)
    if QK_NORM:
        scale = tl.rsqrt(tl.sum(x * x, 1) / DIM + eps)[:, None]
        x = x * scale * tl.load(weight_ptr + d, mask=keep, other=0.0).to(tl.float32)
        y = y * scale * tl.load(weight_ptr + partner, mask=keep, other=0.0).to(tl.float32)
    return x * cos + y * sin


@triton.jit
def _per_column(x, DIM_PAD: tl.constexpr):
    """x: [rows] -> [rows * DIM_PAD], each number DIM_PAD times."""
    return tl.broadcast_to(x[:, None], (x.shape[0], DIM_PAD)).reshape(x.shape[0] * DIM_PAD)


@triton.jit
def _merge_rows(
    partial_ptr, state_ptr, sink_ptr, out_ptr, count, first_row,
    HEADS: tl.constexpr, GROUP: tl.constexpr, LIVE: tl.constexpr, DIM: tl.constexpr,
    DIM_PAD: tl.constexpr, ROWS_AT_ONCE: tl.constexpr, SPLITS_AT_ONCE: tl.constexpr,
    SINKS: tl.constexpr,
):  # fmt: skip
    COLUMNS: tl.constexpr = ROWS_AT_ONCE * DIM_PAD
    columns = tl.arange(0, COLUMNS)
    d = columns % DIM_PAD
    row = first_row + columns // DIM_PAD
    rows = first_row + tl.arange(0, ROWS_AT_ONCE)
    wanted = (row < LIVE) & (d < DIM)
    highest = tl.full((ROWS_AT_ONCE,), LOWEST, tl.float32)
    total = tl.zeros((ROWS_AT_ONCE,), tl.float32)
    merged = tl.zeros((COLUMNS,), tl.float32)
    for first in range(0, count, SPLITS_AT_ONCE):
        splits = first + tl.arange(0, SPLITS_AT_ONCE)
        there = (splits < count)[:, None]
        state = state_ptr + splits[:, None] * (2 * LIVE) + rows[None, :]
        known = there & (rows < LIVE)[None, :]
        top = tl.load(state, mask=known, other=LOWEST, cache_modifier=".cg")
        sums = tl.load(state + LIVE, mask=known, other=0.0, cache_modifier=".cg")
        part = partial_ptr + splits[:, None] * (LIVE * DIM_PAD) + (row * DIM_PAD + d)[None, :]
        part = tl.load(part, mask=there & wanted[None, :], other=0.0, cache_modifier=".cg")
        new = tl.maximum(highest, tl.max(top, 0))
        shrink = tl.exp2(highest - new)
        weights = tl.exp2(top - new[None, :])
        total = total * shrink + tl.sum(weights * sums, 0)
        highest = new
        spread = tl.broadcast_to(
            weights[:, :, None], (SPLITS_AT_ONCE, ROWS_AT_ONCE, DIM_PAD)
        ).reshape(SPLITS_AT_ONCE, COLUMNS)
        merged = merged * _per_column(shrink, DIM_PAD) + tl.sum(part * spread, 0)
    share = share_of(highest, total, sink_ptr, rows % GROUP, rows < LIVE, SINKS)
    merged = merged * _per_column(share, DIM_PAD)
    to = out_ptr + ((row // GROUP) * HEADS + row % GROUP) * DIM + d
    tl.store(to, merged.to(out_ptr.dtype.element_ty), mask=wanted)


@triton.jit
def _merge(
    partial_ptr, state_ptr, sink_ptr, out_ptr, count,
    HEADS: tl.constexpr, GROUP: tl.constexpr, LIVE: tl.constexpr, DIM: tl.constexpr,
    DIM_PAD: tl.constexpr, ROWS_AT_ONCE: tl.constexpr, SPLITS_AT_ONCE: tl.constexpr,
    SINKS: tl.constexpr,
):  # fmt: skip
    """Adds up ``count`` splits of LIVE query rows and writes their output; out_ptr and sink_ptr are
    those of the first. A column's splits all lie with one thread, so that summing needs no exchange
    between warps and has one order."""
    if LIVE <= 4 * ROWS_AT_ONCE:
        for first in tl.static_range(0, LIVE, ROWS_AT_ONCE):
            _merge_rows(
                partial_ptr, state_ptr, sink_ptr, out_ptr, count, first,
                HEADS, GROUP, LIVE, DIM, DIM_PAD, ROWS_AT_ONCE, SPLITS_AT_ONCE, SINKS,
            )  # fmt: skip
    else:
        for first in range(0, LIVE, ROWS_AT_ONCE):
            _merge_rows(
                partial_ptr, state_ptr, sink_ptr, out_ptr, count, first,
                HEADS, GROUP, LIVE, DIM, DIM_PAD, ROWS_AT_ONCE, SPLITS_AT_ONCE, SINKS,
            )  # fmt: skip


@triton.jit
def _attend_own(
    qkv_ptr, cache_ptr, weight_ptr, rotation_ptr, row, head, slot, writes, keep,
    scale, inner, scale_ptr, eps,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_SIZE: tl.constexpr, QK_NORM: tl.constexpr, SOFTCAP: tl.constexpr,
    KIND: tl.constexpr,
):  # fmt: skip
    """Query heads of a new token, [ROWS, DIM_PAD]; in the split that ``writes``, also puts its key
    and value into the cache and starts the softmax with them (maximum, sum, weighted values; with
    int8 these in units of the last that is returned)."""
    GROUP: tl.constexpr = HEADS // KV_HEADS
    d = tl.arange(0, DIM_PAD)[None, :]
    real = d < DIM
    cos = tl.load(rotation_ptr + d % (DIM // 2), mask=real, other=0.0)
    sin = tl.load(rotation_ptr + DIM // 2 + d % (DIM // 2), mask=real, other=0.0)
    sin = tl.where(d < DIM // 2, -sin, sin)
    heads = head * GROUP + tl.arange(0, ROWS)[:, None]
    token = qkv_ptr + row.to(tl.int64) * ((HEADS + 2 * KV_HEADS) * DIM)
    query = _load_head(token, weight_ptr, heads, cos, sin, keep, eps, DIM, DIM_PAD, QK_NORM)
    query = query.to(qkv_ptr.dtype.element_ty if KIND == PLAIN else tl.float16)
    one = HEADS + head + tl.zeros((1, 1), tl.int32)
    key = _load_head(token, weight_ptr, one, cos, sin, real, eps, DIM, DIM_PAD, QK_NORM)
    value = tl.load(token + (one + KV_HEADS) * DIM + d, mask=real, other=0.0)
    PIECE: tl.constexpr = BLOCK_SIZE * (DIM + (4 if KIND == INT8 else 0))
    piece, place = (slot // BLOCK_SIZE * KV_HEADS + head) * 2, slot % BLOCK_SIZE
    stored = real & writes & (slot >= 0)
    unit = 1.0
    if KIND == INT8:
        value = value.to(tl.float32)
        key_scale, value_scale = int8_scale(key), int8_scale(value)
        key, value = int8_codes(key, key_scale), int8_codes(value, value_scale)
        key_scale, value_scale = tl.sum(key_scale), tl.sum(value_scale)
        to = scale_ptr + (piece * PIECE + BLOCK_SIZE * DIM) // 4 + place
        tl.store(to, key_scale, mask=writes & (slot >= 0))
        tl.store(to + PIECE // 4, value_scale, mask=writes & (slot >= 0))
        unit = tl.where(writes, value_scale, 0.0)
    elif KIND != PLAIN:
        key = key / tl.load(scale_ptr + head)
        value = value.to(tl.float32) / tl.load(scale_ptr + KV_HEADS + head)
    key = key.to(cache_ptr.dtype.element_ty)
    value = value.to(cache_ptr.dtype.element_ty)
    to = cache_ptr + piece * PIECE + place * DIM + d
    tl.store(to, key, mask=stored)
    tl.store(to + PIECE, value, mask=stored)
    score = tl.sum(query.to(tl.float32) * key.to(tl.float32), 1)
    if KIND == INT8:
        score *= key_scale
    if SOFTCAP:
        score = capped(score, inner)
    share = tl.where(writes, 1.0, 0.0)
    highest = tl.where(writes, score * scale, LOWEST)
    acc = tl.zeros((ROWS, DIM_PAD), tl.float32) + value.to(tl.float32) * share
    return query, highest, tl.zeros((ROWS,), tl.float32) + share, acc, unit


@triton.jit
def _attend_cached(
    query, cache_ptr, pairs_ptr, scale_ptr, table_ptr, start, end, last, head, positions,
    scale, inner, highest, total, acc, unit,
    KV_HEADS: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, STAGES: tl.constexpr, WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr, KIND: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Keys start .. end - 1 (``start`` a multiple of TILE; ``last`` is the context's last in the
    cache) added to the softmax. ``unit``: with int8, of which ``acc`` is a multiple; it comes back
    as a multiple of 1."""
    PIECE: tl.constexpr = BLOCK_SIZE * (DIM + (4 if KIND == INT8 else 0))
    FACTOR: tl.constexpr = 256.0 if KIND == E4M3 else 1.0  # of what ``halves_of`` gives
    d = tl.arange(0, DIM_PAD)[None, :]
    pair = tl.arange(0, DIM_PAD // 2)[None, :]
    if KIND != PLAIN:
        even, odd = tl.split(tl.reshape(acc / FACTOR, (ROWS, DIM_PAD // 2, 2)))
    for first in tl.range(start, end, TILE, num_stages=STAGES):
        keys = first + tl.arange(0, TILE)
        piece, places = key_places(table_ptr, first, last, head, KV_HEADS, BLOCK_SIZE, TILE)
        lines = (piece * PIECE + places * DIM)[:, None]
        key = tl.load(cache_ptr + lines + d, mask=d < DIM, other=0.0)
        if KIND != PLAIN:
            key = in_half(key, KIND, ASM)
        scores = tl.dot(query, tl.trans(key))
        inside = keys <= last
        if KIND == INT8:
            scales = scale_ptr + (piece * PIECE + BLOCK_SIZE * DIM) // 4 + places
            scores *= tl.load(scales, mask=inside, other=0.0)[None, :]
        if SOFTCAP:
            scores = capped(scores, inner)
        seen = inside[None, :] & visible(keys[None, :], positions[:, None], WINDOW)
        scores = tl.where(seen, scores, float("-inf"))
        weights, shrink, highest, total = softmax_step(scores, scale, highest, total)
        if KIND == INT8:
            scales = tl.load(scales + PIECE // 4, mask=inside, other=0.0)
            scales, smaller, unit = in_largest(scales, unit)
            weights *= scales[None, :]
            shrink *= smaller
        weights = weights.to(query.dtype)
        # What lies beyond the context may be another request's, and not finite.
        if KIND == PLAIN:
            value = cache_ptr + lines + PIECE + d
            value = tl.load(value, mask=inside[:, None] & (d < DIM), other=0.0)
            acc = tl.dot(weights, value, acc * shrink[:, None])
        else:
            value = pairs_ptr + (lines + PIECE) // 2 + pair
            value = tl.load(value, mask=inside[:, None] & (pair < DIM // 2), other=0)
            left, right = halves_of(value, KIND, ASM)
            even = tl.dot(weights, left, even * shrink[:, None])
            odd = tl.dot(weights, right, odd * shrink[:, None])
    if KIND != PLAIN:
        acc = tl.reshape(tl.join(even, odd), (ROWS, DIM_PAD)) * FACTOR
    if KIND == INT8:
        acc *= unit
    return highest, total, acc


@triton.jit(
    do_not_specialize=["table_stride", "min_tiles"],
    do_not_specialize_on_alignment=["slot_ptr", "length_ptr", "table_ptr"],
)
def decode_attention_kernel(
    qkv_ptr, cache_ptr, pairs_ptr, scale_ptr, out_ptr, slot_ptr, length_ptr, table_ptr,
    rotation_ptr, weight_ptr, sink_ptr, partial_ptr, state_ptr, arrived_ptr, table_stride,
    min_tiles, scale, inner, eps,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr,
    ROWS: tl.constexpr, QUERIES: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr,
    STAGES: tl.constexpr, WINDOW: tl.constexpr, QK_NORM: tl.constexpr, BY_TOKEN: tl.constexpr,
    SOFTCAP: tl.constexpr, SINKS: tl.constexpr, KIND: tl.constexpr, ASM: tl.constexpr,
    ROWS_AT_ONCE: tl.constexpr, SPLITS_AT_ONCE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (kv heads, batch rows, most splits). Programs start in that order: those of splits that
    short rows do not have come last. (With splits first, 256 rows of 1,024 tokens in E4M3 took 248
    us on an H200 where there was room for 16 splits, 133 where there was for one.) A batch row
    brings QUERIES tokens, the first ones of the step; query row i of the ROWS (a power of two) of a
    program is head i % group of its token i // group.

    QUERIES == 1: qkv is raw. More (a token and its drafts): rope_cache_kernel has run before.

    qkv: [T, (HEADS + 2 KV_HEADS) * DIM]. out: [T, HEADS * DIM]. slot: int64 [T]. length: int32
    [batch rows], 0 for padding, whose output is 0. table: int32 [batch rows, table_stride].
    rotation: FP32 [positions, or T if BY_TOKEN; DIM], cos, then sin. weight: [HEADS + KV_HEADS,
    DIM]. partial: FP32 [batch rows, KV_HEADS, splits, group * QUERIES, DIM_PAD]; state: FP32 [batch
    rows, KV_HEADS, splits, 2, group * QUERIES]; arrived: int32 [batch rows, KV_HEADS], zeros
    before and after. A split takes min_tiles tiles at least. scale: to scores in units of log 2;
    with SOFTCAP of ``capped(scores, inner)``. sink: [HEADS] if SINKS. KIND: what the cache keeps
    (kept.py); but for PLAIN, pairs_ptr is the same memory as int16, and scale_ptr, FP32, that
    memory with int8, the scales [2, KV_HEADS] of keys and values with FP8.
    """
    if PDL == 1:
        gdc_launch_dependents()
    if PDL:
        gdc_wait()
    GROUP: tl.constexpr = HEADS // KV_HEADS
    LIVE: tl.constexpr = GROUP * QUERIES
    FUSED: tl.constexpr = QUERIES == 1
    head, row, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    i = tl.arange(0, ROWS)
    d = tl.arange(0, DIM_PAD)[None, :]
    keep = (i < LIVE)[:, None] & (d < DIM)
    out_ptr += (row.to(tl.int64) * QUERIES * HEADS + head * GROUP) * DIM
    to = ((i // GROUP) * HEADS + i % GROUP)[:, None] * DIM + d
    length = tl.load(length_ptr + row)
    if length == 0:
        if split == 0:
            tl.store(out_ptr + to, tl.zeros((ROWS, DIM_PAD), out_ptr.dtype.element_ty), mask=keep)
        return

    last = length - 1 - FUSED  # the last key in the cache
    low = tl.maximum(length - QUERIES - WINDOW + 1, 0) // TILE if WINDOW else 0
    tiles = tl.maximum(tl.cdiv(last + 1, TILE) - low, 1)
    each = tl.maximum(tl.cdiv(tiles, tl.num_programs(2)), min_tiles)
    count = tl.cdiv(tiles, each)
    if split >= count:
        return
    if KIND > INT8:
        if SOFTCAP:
            inner *= tl.load(scale_ptr + head)
        else:
            scale *= tl.load(scale_ptr + head)
    unit = 0.0
    if FUSED:
        query, highest, total, acc, unit = _attend_own(
            qkv_ptr, cache_ptr, weight_ptr,
            rotation_ptr + (row if BY_TOKEN else length - 1) * DIM,
            row, head, tl.load(slot_ptr + row), split == count - 1, keep,
            scale, inner, scale_ptr, eps,
            HEADS, KV_HEADS, DIM, DIM_PAD, ROWS, BLOCK_SIZE, QK_NORM, SOFTCAP, KIND,
        )  # fmt: skip
    else:
        token = row.to(tl.int64) * QUERIES + (i // GROUP)[:, None]
        query_head = (head * GROUP + i % GROUP)[:, None]
        query = qkv_ptr + (token * (HEADS + 2 * KV_HEADS) + query_head) * DIM + d
        query = tl.load(query, mask=keep, other=0.0)
        query = query.to(qkv_ptr.dtype.element_ty if KIND == PLAIN else tl.float16)
        highest = tl.full((ROWS,), LOWEST, tl.float32)
        total = tl.zeros((ROWS,), tl.float32)
        acc = tl.zeros((ROWS, DIM_PAD), tl.float32)
    start = (low + split * each) * TILE
    highest, total, acc = _attend_cached(
        query, cache_ptr, pairs_ptr, scale_ptr, table_ptr + row * table_stride,
        start, tl.minimum(start + each * TILE, last + 1), last, head,
        length - QUERIES + i // GROUP, scale, inner, highest, total, acc, tl.maximum(unit, 1e-30),
        KV_HEADS, DIM, DIM_PAD, ROWS, BLOCK_SIZE, TILE, STAGES, WINDOW, SOFTCAP, KIND, ASM,
    )  # fmt: skip
    if KIND > INT8:
        acc *= tl.load(scale_ptr + KV_HEADS + head)
    if PDL == 2:
        gdc_launch_dependents()

    if SINKS:
        sink_ptr += head * GROUP
    if count == 1:
        acc *= share_of(highest, total, sink_ptr, i % GROUP, i < LIVE, SINKS)[:, None]
        tl.store(out_ptr + to, acc.to(out_ptr.dtype.element_ty), mask=keep)
        return
    pair = row * KV_HEADS + head
    first_part = pair * tl.num_programs(2)
    mine = first_part + split
    tl.store(partial_ptr + (mine * LIVE + i)[:, None] * DIM_PAD + d, acc, mask=keep)
    tl.store(state_ptr + mine * (2 * LIVE) + i, highest, mask=i < LIVE)
    tl.store(state_ptr + mine * (2 * LIVE) + LIVE + i, total, mask=i < LIVE)
    tl.debug_barrier()  # all of the program's stores, before it counts as arrived
    if tl.atomic_add(arrived_ptr + pair, 1, sem="acq_rel", scope="gpu") == count - 1:
        _merge(
            partial_ptr + first_part * (LIVE * DIM_PAD), state_ptr + first_part * (2 * LIVE),
            sink_ptr, out_ptr, count,
            HEADS, GROUP, LIVE, DIM, DIM_PAD, ROWS_AT_ONCE, SPLITS_AT_ONCE, SINKS,
        )  # fmt: skip
        tl.store(arrived_ptr + pair, 0)
