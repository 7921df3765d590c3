"""Rows of the token embedding."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from octavo.ops.registry import register
from octavo.ops.triton.launch import EARLY, OFF, available, next_power_of_2, options, pdl_for

MAX_BLOCK = 4096


@triton.jit
def embedding_kernel(
    ids_ptr, weight_ptr, y_ptr, vocab, SIZE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    if PDL != 0:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < SIZE
    token = tl.load(ids_ptr + row).to(tl.int64)
    known = (token >= 0) & (token < vocab)
    x = tl.load(weight_ptr + token * SIZE + columns, mask=inside & known, other=0.0)
    tl.store(y_ptr + row * SIZE + columns, x, mask=inside)


@register("embedding", "triton", available, batch_invariant="yes")
def embedding(ids: Tensor, weight: Tensor) -> Tensor:
    """ids: int64 [T]; weight: [V, H] contiguous. An id outside the vocabulary (padding) gives
    zeros: a kernel of a graph cannot raise."""
    vocab, size = weight.shape
    y = weight.new_empty(len(ids), size)
    if len(ids):
        pdl = EARLY if pdl_for(len(ids)) else OFF
        block = min(MAX_BLOCK, next_power_of_2(size))
        embedding_kernel[(len(ids), triton.cdiv(size, block))](
            ids, weight, y, vocab, SIZE=size, BLOCK=block, PDL=pdl, **options(4, pdl)
        )
    return y
