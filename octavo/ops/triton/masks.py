"""Masks of ids that may be drawn, on the device (definition: ``ops.masks``)."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from octavo.ops.triton.launch import options

TILE = 4096


@triton.jit(do_not_specialize_on_alignment=["index", "masks"])
def _keep_allowed(
    logits, logits_stride, index, masks, words, vocab,
    TILE: tl.constexpr,
):  # fmt: skip
    """grid (tiles of the vocabulary, rows)."""
    r = tl.program_id(1)
    own = tl.load(index + r)
    if own < 0:
        return
    ids = tl.program_id(0) * TILE + tl.arange(0, TILE)
    inside = ids < vocab
    bits = tl.load(masks + own.to(tl.int64) * words + ids // 32, mask=inside, other=0)
    banned = ((bits >> (ids % 32)) & 1) == 0
    row = logits + r.to(tl.int64) * logits_stride
    tl.store(row + ids, float("-inf"), mask=banned & inside)


def keep_allowed(logits: Tensor, index: Tensor, masks: Tensor, tile: int = TILE) -> None:
    """In place: -inf wherever the bit of a row's mask is 0.

    logits: float32 [n, V], rows contiguous; index: int32 [n], the mask of each row, -1 where it is
    left alone; masks: int32 [m, W], W >= V / 32.
    """
    rows, vocab = logits.shape
    _keep_allowed[(triton.cdiv(vocab, tile), rows)](
        logits, logits.stride(0), index, masks, masks.stride(0), vocab,
        TILE=tile, **options(8),
    )  # fmt: skip
