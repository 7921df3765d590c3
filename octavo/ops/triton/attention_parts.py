"""What the attention kernels share: where keys lie, heads before attention, the running softmax.

Cache: [block, kv head, 2, block_size, d]. The keys of one block and head are one piece, its values
the next, so that, seen as rows of d numbers, a token's value lies block_size rows after its key.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOWEST = tl.constexpr(-1e30)  # before any score; finite, so that rows which see nothing give no NaN


@triton.jit
def key_rows(
    table_ptr,
    start,
    last,
    head,
    KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
):
    """Rows of the cache, int64 [TILE], with the keys of positions start .. start + TILE - 1.
    ``start``: a multiple of TILE. Beyond ``last`` they hold anything, but are the context's own."""
    offsets = tl.arange(0, TILE)
    if TILE <= BLOCK_SIZE:
        block = tl.load(table_ptr + start // BLOCK_SIZE).to(tl.int64)
        places = start % BLOCK_SIZE + offsets
    else:
        positions = tl.minimum(start + offsets, last)
        block = tl.load(table_ptr + positions // BLOCK_SIZE).to(tl.int64)
        places = positions % BLOCK_SIZE
    return (block * KV_HEADS + head) * (2 * BLOCK_SIZE) + places


@triton.jit
def visible(keys, positions, WINDOW: tl.constexpr):
    """Whether tokens at ``positions`` see ``keys`` (positions too); broadcast."""
    seen = keys <= positions
    if WINDOW:
        seen = seen & (keys > positions - WINDOW)
    return seen


@triton.jit
def softmax_step(scores, scale, highest, total):
    """scores: [m, n]; times ``scale`` > 0 they are in units of log 2. Returns their weights, the
    factor for what was summed up before, and the running maximum (scaled) and sum, [m] each
    (Milakov & Gimelshein 2018)."""
    new = tl.maximum(highest, tl.max(scores, 1) * scale)
    weights = tl.exp2(scores * scale - new[:, None])
    shrink = tl.exp2(highest - new)
    return weights, shrink, new, total * shrink + tl.sum(weights, 1)


@triton.jit
def capped(scores, inner):
    """tanh(scores * inner / (2 log2 e)), accurate to FP32's epsilon near 1."""
    return 1.0 - 2.0 / (1.0 + tl.exp2(scores * inner))


@triton.jit
def share_of(highest, total, sink_ptr, heads, live, SINKS: tl.constexpr):
    """What weighted values are multiplied by once all keys are in. SINKS: every head has one more
    score, of nothing."""
    if SINKS:
        sink = tl.load(sink_ptr + heads, mask=live, other=0.0).to(tl.float32)
        sink *= 1.4426950408889634
        new = tl.maximum(highest, sink)
        shrink = tl.exp2(highest - new)
        share = shrink / (total * shrink + tl.exp2(sink - new))
    else:
        share = 1.0 / tl.maximum(total, 1e-30)
    return share


@triton.jit
def fp8_pairs(pairs, ASM: tl.constexpr):
    """int16, two neighbouring E4M3 numbers each: FP16 tensors of the first and of the second ones,
    2^-8 of their values. Bits are only moved: sign, exponent and mantissa go where FP16 has them,
    whose exponent counts from 15, not 7. (An 8-bit tensor would be read from shared memory byte by
    byte to become a matrix operand.)"""
    if ASM:
        first, second = tl.inline_asm_elementwise(
            """{
            .reg .b32 low, high;
            shl.b32 $0, $2, 8;
            shl.b32 low, $2, 7;
            and.b32 low, low, 0x3f803f80;
            lop3.b32 $0, $0, 0x80008000, low, 0xea;
            shr.u32 high, $2, 1;
            and.b32 high, high, 0x3f803f80;
            lop3.b32 $1, $2, 0x80008000, high, 0xea;
            }""",
            "=&r,=&r,r",
            [pairs],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    else:
        bits = pairs.to(tl.uint16, bitcast=True)
        first = (((bits << 8) & 0x8000) | ((bits << 7) & 0x3F80)).to(tl.uint16)
        second = ((bits & 0x8000) | ((bits >> 1) & 0x3F80)).to(tl.uint16)
        first = first.to(tl.float16, bitcast=True)
        second = second.to(tl.float16, bitcast=True)
    return first, second
