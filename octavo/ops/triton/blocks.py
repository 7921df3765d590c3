"""Copies of KV blocks in all layers by one kernel."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.ops.registry import register
from octavo.ops.triton.launch import available, options

WORDS = 2048  # of eight bytes, copied by one program


@triton.jit
def copy_blocks_kernel(
    address_ptr, pairs_ptr, block_words, pairs_stride, WORDS: tl.constexpr
):  # fmt: skip
    base = tl.load(address_ptr + tl.program_id(1)).to(tl.pointer_type(tl.int64))
    base = tl.multiple_of(base, 16)
    pair = pairs_ptr + tl.program_id(2).to(tl.int64) * pairs_stride
    source, target = tl.load(pair), tl.load(pair + 1)
    words = tl.program_id(0) * WORDS + tl.arange(0, WORDS)
    inside = words < block_words
    values = tl.load(base + source * block_words + words, mask=inside)
    tl.store(base + target * block_words + words, values, mask=inside)


@lru_cache(maxsize=16)
def _addresses(device: torch.device, *pointers: int) -> Tensor:
    """int64 [layers] on ``device``: made once for a cache, not per step."""
    return torch.tensor(pointers, dtype=torch.int64).to(device)


@register("copy_blocks", "triton", available, batch_invariant="yes")
def copy_blocks(caches: Sequence[Tensor], pairs: Tensor) -> None:
    """caches: one contiguous tensor per layer, all of one size; pairs: int64 [c, 2].

    Programs read and write in any order, so no block may be both a source and a destination. No
    plan has such pairs: a block freed or forked in a plan is never a copy's destination in it.
    Raises ValueError for caches of different sizes.
    """
    if not len(pairs):
        return
    blocks = {(len(cache), cache.nbytes, cache.is_contiguous()) for cache in caches}
    (count, size, contiguous), *others = blocks
    block_bytes = size // count
    if others or not contiguous or block_bytes % 8:
        raise ValueError("copy_blocks takes contiguous caches of one size, in words of 8 bytes")
    block_words = block_bytes // 8
    addresses = _addresses(pairs.device, *(cache.data_ptr() for cache in caches))
    grid = (triton.cdiv(block_words, WORDS), len(caches), len(pairs))
    copy_blocks_kernel[grid](
        addresses, pairs, block_words, pairs.stride(0), WORDS=WORDS, **options(8)
    )
