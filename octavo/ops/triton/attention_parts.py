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
