"""RoPE of latent attention's queries and shared keys, and what is cached of each token."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _turned(first, second, keep, cos, sin):
    """Pairs at these addresses after RoPE, FP32."""
    x = tl.load(first, mask=keep, other=0.0).to(tl.float32)
    y = tl.load(second, mask=keep, other=0.0).to(tl.float32)
    return x * cos - y * sin, y * cos + x * sin


@triton.jit(do_not_specialize_on_alignment=["slot_ptr", "position_ptr"])
def latent_cache_kernel(
    q_ptr, kv_ptr, query_ptr, cache_ptr, mixed_ptr, slot_ptr, position_ptr, rotation_ptr,
    HEADS: tl.constexpr, NOPE: tl.constexpr, LATENT: tl.constexpr, LATENT_PAD: tl.constexpr,
    ROPE: tl.constexpr, HALF_PAD: tl.constexpr, INTERLEAVED: tl.constexpr, BY_TOKEN: tl.constexpr,
    HEADS_AT_ONCE: tl.constexpr,
):  # fmt: skip
    """Grid (T, heads / HEADS_AT_ONCE): some heads of a token; the first of them also fill its slot.

    q: [T, HEADS, NOPE + ROPE]. kv: [T, LATENT + ROPE]. query: [T, HEADS, LATENT + ROPE], whose last
    ROPE columns are written. cache: [slots, LATENT + ROPE]. slot: int64 [T], -1 for padding, of
    which nothing is read and mixed [T, HEADS, LATENT] becomes 0. position: int64 [T]. rotation:
    FP32 [positions, or T if BY_TOKEN; ROPE], cos, then sin.
    """
    t = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * HEADS_AT_ONCE + tl.arange(0, HEADS_AT_ONCE)[:, None]
    live = heads < HEADS
    column = tl.arange(0, LATENT_PAD)[None, :]
    slot = tl.load(slot_ptr + t)
    if slot < 0:
        nothing = tl.zeros((HEADS_AT_ONCE, LATENT_PAD), mixed_ptr.dtype.element_ty)
        to = mixed_ptr + (t * HEADS + heads) * LATENT + column
        tl.store(to, nothing, mask=live & (column < LATENT))
        return

    pair = tl.arange(0, HALF_PAD)[None, :]
    real = pair < ROPE // 2
    first = 2 * pair if INTERLEAVED else pair
    second = first + (1 if INTERLEAVED else ROPE // 2)
    angles = rotation_ptr + (t if BY_TOKEN else tl.load(position_ptr + t)) * ROPE
    cos = tl.load(angles + pair, mask=real, other=0.0)
    sin = tl.load(angles + ROPE // 2 + pair, mask=real, other=0.0)
    q = q_ptr + (t * HEADS + heads) * (NOPE + ROPE) + NOPE
    keep = live & real
    x, y = _turned(q + first, q + second, keep, cos, sin)
    to = query_ptr + (t * HEADS + heads) * (LATENT + ROPE) + LATENT
    tl.store(to + first, x.to(query_ptr.dtype.element_ty), mask=keep)
    tl.store(to + second, y.to(query_ptr.dtype.element_ty), mask=keep)
    if tl.program_id(1) == 0:
        kv = kv_ptr + t * (LATENT + ROPE)
        place = cache_ptr + slot * (LATENT + ROPE)
        latent = tl.load(kv + column, mask=column < LATENT, other=0.0)
        tl.store(place + column, latent.to(cache_ptr.dtype.element_ty), mask=column < LATENT)
        kv, place = kv + LATENT, place + LATENT
        key, partner = _turned(kv + first, kv + second, real, cos, sin)
        tl.store(place + first, key.to(cache_ptr.dtype.element_ty), mask=real)
        tl.store(place + second, partner.to(cache_ptr.dtype.element_ty), mask=real)
