"""q/k norm and RoPE of token rows, and their keys and values into the cache: what comes before
attention where a row brings several tokens."""

from __future__ import annotations

import triton
import triton.language as tl

from octavo.ops.triton.kept import INT8, PLAIN, int8_codes, int8_scale


@triton.jit
def _halves(
    token_ptr, weight_ptr, heads, live, cos, sin, eps,
    DIM: tl.constexpr, HALF_PAD: tl.constexpr, QK_NORM: tl.constexpr,
):  # fmt: skip
    """Both halves of heads after norm and RoPE, FP32 [heads, HALF_PAD] each."""
    d = tl.arange(0, HALF_PAD)[None, :]
    at = heads[:, None] * DIM + d
    keep = live[:, None] & (d < DIM // 2)
    x = tl.load(token_ptr + at, mask=keep, other=0.0).to(tl.float32)
    y = tl.load(token_ptr + at + DIM // 2, mask=keep, other=0.0).to(tl.float32)
    if QK_NORM:
        scale = tl.rsqrt((tl.sum(x * x, 1) + tl.sum(y * y, 1)) / DIM + eps)[:, None]
        x = x * scale * tl.load(weight_ptr + at, mask=keep, other=0.0).to(tl.float32)
        y = y * scale * tl.load(weight_ptr + at + DIM // 2, mask=keep, other=0.0).to(tl.float32)
    return x * cos - y * sin, y * cos + x * sin


@triton.jit
def _keep(
    x, y, cache_ptr, scale_ptr, own_ptr, piece, place, live, d,
    DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, PIECE: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """Puts heads, both halves [heads, HALF_PAD] each, at ``place`` of their pieces. own_ptr: of
    their scales, with FP8."""
    keep = live[:, None] & (d < DIM // 2)
    if KIND == INT8:
        x, y = x.to(tl.float32), y.to(tl.float32)
        scale = tl.maximum(int8_scale(x), int8_scale(y), propagate_nan=tl.PropagateNan.ALL)
        x, y = int8_codes(x, scale), int8_codes(y, scale)
        to = scale_ptr + ((piece * PIECE + BLOCK_SIZE * DIM) // 4 + place)[:, None]
        tl.store(to, scale, mask=live[:, None])
    elif KIND != PLAIN:
        scale = tl.load(own_ptr, mask=live, other=1.0)[:, None]
        x, y = x.to(tl.float32) / scale, y.to(tl.float32) / scale
    to = cache_ptr + (piece * PIECE + place * DIM)[:, None] + d
    tl.store(to, x.to(cache_ptr.dtype.element_ty), mask=keep)
    tl.store(to + DIM // 2, y.to(cache_ptr.dtype.element_ty), mask=keep)


@triton.jit(
    do_not_specialize=["first_token"],
    do_not_specialize_on_alignment=["slot_ptr", "position_ptr"],
)
def rope_cache_kernel(
    qkv_ptr, cache_ptr, scale_ptr, out_ptr, slot_ptr, position_ptr, rotation_ptr, weight_ptr,
    first_token, eps,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, HALF_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, QK_NORM: tl.constexpr, BY_TOKEN: tl.constexpr,
    HEADS_AT_ONCE: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """Program i: all heads of token first_token + i, some at a time; queries in place.

    qkv: [T, (HEADS + 2 KV_HEADS) * DIM]. slot: int64 [T], -1 for padding, whose output is 0 and
    which is not touched otherwise. position: int64 [T]. rotation: FP32 [positions, or T if
    BY_TOKEN; DIM], cos, then sin. weight: [HEADS + KV_HEADS, DIM]. out: [T, HEADS * DIM]. KIND:
    what the cache keeps (kept.py); scale_ptr: FP32, with int8 the memory of the cache, with FP8 the
    scales [2, KV_HEADS] of keys and values.
    """
    t = first_token + tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_ptr + t)
    d = tl.arange(0, HALF_PAD)[None, :]
    half = d < DIM // 2
    more = tl.arange(0, HEADS_AT_ONCE)
    if slot < 0:
        for first in tl.range(0, HEADS, HEADS_AT_ONCE):
            heads = first + more
            to = out_ptr + (t * HEADS + heads[:, None]) * DIM + d
            keep = (heads < HEADS)[:, None] & half
            nothing = tl.zeros((HEADS_AT_ONCE, HALF_PAD), out_ptr.dtype.element_ty)
            tl.store(to, nothing, mask=keep)
            tl.store(to + DIM // 2, nothing, mask=keep)
        return

    angles = rotation_ptr + (t if BY_TOKEN else tl.load(position_ptr + t)) * DIM
    cos = tl.load(angles + d, mask=half, other=0.0)
    sin = tl.load(angles + DIM // 2 + d, mask=half, other=0.0)
    token = qkv_ptr + t * ((HEADS + 2 * KV_HEADS) * DIM)
    for first in tl.range(0, HEADS, HEADS_AT_ONCE):
        heads = first + more
        live = heads < HEADS
        x, y = _halves(token, weight_ptr, heads, live, cos, sin, eps, DIM, HALF_PAD, QK_NORM)
        to = token + heads[:, None] * DIM + d
        tl.store(to, x.to(qkv_ptr.dtype.element_ty), mask=live[:, None] & half)
        tl.store(to + DIM // 2, y.to(qkv_ptr.dtype.element_ty), mask=live[:, None] & half)
    PIECE: tl.constexpr = BLOCK_SIZE * (DIM + (4 if KIND == INT8 else 0))
    first_piece, place = slot // BLOCK_SIZE * (2 * KV_HEADS), slot % BLOCK_SIZE
    for first in tl.range(0, KV_HEADS, HEADS_AT_ONCE):
        heads = first + more
        live = heads < KV_HEADS
        piece = first_piece + 2 * heads
        x, y = _halves(
            token, weight_ptr, HEADS + heads, live, cos, sin, eps, DIM, HALF_PAD, QK_NORM
        )
        _keep(
            x, y, cache_ptr, scale_ptr, scale_ptr + heads if KIND > INT8 else None, piece, place,
            live, d, DIM, BLOCK_SIZE, PIECE, KIND,
        )  # fmt: skip
        value = token + (HEADS + KV_HEADS + heads)[:, None] * DIM + d
        x = tl.load(value, mask=live[:, None] & half, other=0.0)
        y = tl.load(value + DIM // 2, mask=live[:, None] & half, other=0.0)
        _keep(
            x, y, cache_ptr, scale_ptr, scale_ptr + KV_HEADS + heads if KIND > INT8 else None,
            piece + 1, place, live, d, DIM, BLOCK_SIZE, PIECE, KIND,
        )  # fmt: skip
