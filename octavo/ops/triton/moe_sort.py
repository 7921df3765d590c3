"""Pairs of a token and an expert, sorted by expert in tiles of equal size, on the device.

A tile holds pairs of one expert, so a product of a tile reads one expert's weights. The number of
tiles is known on the device alone; what is allocated and launched is its upper bound. Places come
from counts and running sums, without atomics: they are the same every time.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from octavo.ops.triton.launch import OFF, next_power_of_2, options

SMALL, CHUNK = 512, 4096  # ids read at a time
TILES = 64  # numbers of tiles written at a time


@dataclass(frozen=True)
class Sorted:
    """``order``: int32 [count * rows], the pair at each row of each tile, -1 where there is none.
    ``experts``: int32 [count], each tile's expert, -1 for those there is no need of. A pair's
    number is token * k + place."""

    order: Tensor
    experts: Tensor
    rows: int

    @property
    def count(self) -> int:
        return len(self.experts)


@triton.jit
def _histogram(ids_ptr, start, size, CHUNK: tl.constexpr, BLOCK_E: tl.constexpr):
    at = start + tl.arange(0, CHUNK)
    ids = tl.load(ids_ptr + at, mask=at < size, other=-1)
    return tl.histogram(ids, BLOCK_E, mask=ids >= 0)


@triton.jit(do_not_specialize=["size"])
def count_kernel(
    ids_ptr, counts_ptr, size,
    CHUNK: tl.constexpr, BLOCK_E: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """counts[chunk, e]: pairs of expert e among the chunk's ids."""
    if PDL != 0:
        gdc_wait()
        gdc_launch_dependents()
    chunk = tl.program_id(0)
    counts = _histogram(ids_ptr, chunk * CHUNK, size, CHUNK, BLOCK_E)
    tl.store(counts_ptr + chunk * BLOCK_E + tl.arange(0, BLOCK_E), counts)


@triton.jit(do_not_specialize=["size", "chunks", "bound"])
def place_kernel(
    ids_ptr, counts_ptr, order_ptr, experts_ptr, size, chunks, bound,
    ROWS: tl.constexpr, CHUNK: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_T: tl.constexpr,
    COUNTED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A program places the pairs of one expert among one chunk of ids; that of the first chunk
    also names the expert's tiles, and pads the last of them. COUNTED: there are several chunks."""
    if PDL != 0:
        gdc_wait()
        gdc_launch_dependents()
    expert, chunk = tl.program_id(0), tl.program_id(1)
    experts = tl.arange(0, BLOCK_E)
    before = 0
    if COUNTED:
        counts = tl.zeros((BLOCK_E,), tl.int32)
        for i in range(chunks):
            part = tl.load(counts_ptr + i * BLOCK_E + experts)
            counts += part
            if i < chunk:
                before += tl.sum(tl.where(experts == expert, part, 0), 0)
    else:
        counts = _histogram(ids_ptr, 0, size, CHUNK, BLOCK_E)
    tiles = (counts + ROWS - 1) // ROWS
    first = tl.sum(tl.where(experts < expert, tiles, 0), 0)
    mine = tl.sum(tl.where(experts == expert, counts, 0), 0)

    pairs = chunk * CHUNK + tl.arange(0, CHUNK)
    ids = tl.load(ids_ptr + pairs, mask=pairs < size, other=-1)
    chosen = ids == expert
    places = first * ROWS + before + tl.cumsum(chosen.to(tl.int32), 0) - 1
    tl.store(order_ptr + places, pairs, mask=chosen)
    if chunk == 0:
        own = (mine + ROWS - 1) // ROWS
        padding = mine + tl.arange(0, ROWS)
        tl.store(order_ptr + first * ROWS + padding, -1, mask=padding < own * ROWS)
        some = tl.arange(0, BLOCK_T)
        for at in range(0, own, BLOCK_T):
            tl.store(experts_ptr + first + at + some, expert, mask=at + some < own)
        if expert == 0:
            for at in range(tl.sum(tiles, 0), bound, BLOCK_T):
                tl.store(experts_ptr + at + some, -1, mask=at + some < bound)


def tile_bound(pairs: int, experts: int, rows: int) -> int:
    """Most tiles of ``rows`` that so many pairs can fill: every expert may leave one unfinished."""
    return (pairs + min(pairs, experts) * (rows - 1)) // rows


def sort_by_expert(ids: Tensor, num_experts: int, rows: int, pdl: int = OFF) -> Sorted:
    """ids: int32 [T, k], contiguous, not empty; -1 is left out. rows: of a tile, a power of two.
    Pairs of one expert keep their order."""
    size = ids.numel()
    bound = tile_bound(size, num_experts, rows)
    order = torch.empty(bound * rows, dtype=torch.int32, device=ids.device)
    experts = torch.empty(bound, dtype=torch.int32, device=ids.device)
    block_e = next_power_of_2(num_experts)
    chunk = SMALL if size <= SMALL else CHUNK
    chunks = triton.cdiv(size, chunk)
    counts = order
    if chunks > 1:
        counts = torch.empty(chunks * block_e, dtype=torch.int32, device=ids.device)
        count_kernel[(chunks,)](
            ids, counts, size, CHUNK=chunk, BLOCK_E=block_e, PDL=pdl, **options(8, pdl)
        )
    place_kernel[(num_experts, chunks)](
        ids, counts, order, experts, size, chunks, bound,
        ROWS=rows, CHUNK=chunk, BLOCK_E=block_e, BLOCK_T=TILES, COUNTED=chunks > 1, PDL=pdl,
        **options(4 if chunk == SMALL else 8, pdl),
    )  # fmt: skip
    return Sorted(order, experts, rows)
