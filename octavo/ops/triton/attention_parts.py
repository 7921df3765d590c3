"""What the attention kernels share: where keys lie, heads before attention, the running softmax.

Cache: [block, kv head, 2, block_size, d]. The keys of one block and head are one piece, its values
the next. With int8 (kept.py) the scales of a piece follow its numbers.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOWEST = tl.constexpr(-1e30)  # before any score; finite, so that rows which see nothing give no NaN


@triton.jit
def key_places(
    table_ptr,
    start,
    last,
    head,
    KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
):
    """Where the keys of positions start .. start + TILE - 1 lie: which pieces of the cache, int64
    [TILE] or one for all, and which places there, [TILE]. ``start``: a multiple of TILE. Beyond
    ``last`` they hold anything, but are the context's own."""
    offsets = tl.arange(0, TILE)
    if TILE <= BLOCK_SIZE:
        block = tl.load(table_ptr + start // BLOCK_SIZE).to(tl.int64)
        places = start % BLOCK_SIZE + offsets
    else:
        positions = tl.minimum(start + offsets, last)
        block = tl.load(table_ptr + positions // BLOCK_SIZE).to(tl.int64)
        places = positions % BLOCK_SIZE
    return (block * KV_HEADS + head) * 2, places


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
