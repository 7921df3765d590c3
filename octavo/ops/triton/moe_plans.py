"""Which tiles the products of experts are made of, by how many pairs there are.

Rules from bytes and shapes; ``python -m benchmarks.gpu.moe --candidates`` measures the others.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from octavo.ops.triton.plans import SHARED_MEMORY

TILE_ROWS = (16, 32, 64, 128)


@dataclass(frozen=True)
class GroupedPlan:
    """``block_m``: pairs of a tile; ``block_n``: rows of the weight; ``block_k``: columns at a
    time; ``swap``: the weights are the 64-row operand of the tensor cores."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    swap: bool

    def shared_memory(self) -> int:
        """Bytes of the tiles in flight."""
        return (self.block_n + self.block_m) * self.block_k * 2 * self.num_stages


@dataclass(frozen=True)
class PairPlan:
    """``block_n``: outputs of a program; ``block_k``: columns at a time."""

    block_n: int
    block_k: int
    num_warps: int


@dataclass(frozen=True)
class Plans:
    """The two products for one number of pairs: each pair by itself, or tiles of pairs."""

    up: PairPlan | GroupedPlan
    down: PairPlan | GroupedPlan


_HOPPER = {
    16: (64, 128, 4, 4, True),
    32: (64, 128, 4, 4, True),
    64: (128, 64, 4, 4, False),
    128: (128, 64, 8, 4, False),
}
# 99 KB of shared memory are there on every card from compute capability 8.0 on.
_OTHERS = dict.fromkeys(TILE_ROWS, (64, 64, 4, 3, False))


def one_by_one(tokens: int, top_k: int, num_experts: int) -> bool:
    """Whether each pair reads its expert's weights by itself: with so few pairs hardly two share
    an expert, and there is nothing to sort."""
    return tokens == 1 or tokens * top_k <= num_experts // 4


def tile_rows(pairs: int, num_experts: int) -> int:
    """Pairs of a tile: twice the mean of an expert, so that most need one tile only and their
    weights are read once."""
    return next((rows for rows in TILE_ROWS if rows * num_experts >= 2 * pairs), TILE_ROWS[-1])


def choose(
    tokens: int, top_k: int, num_experts: int, sizes: tuple[int, int], hopper: bool
) -> Plans:
    """sizes: columns of the gate and up projections (h), and of the down projection (m)."""
    if one_by_one(tokens, top_k, num_experts):
        return pair_plans(top_k, sizes)
    return tile_plans(tile_rows(tokens * top_k, num_experts), hopper)


def pair_plans(top_k: int, sizes: tuple[int, int]) -> Plans:
    hidden, inner = sizes
    return Plans(
        PairPlan(2, columns_at_a_time(hidden), num_warps=2),
        PairPlan(4 if top_k * inner < 8192 else 2, columns_at_a_time(inner), num_warps=2),
    )


def tile_plans(rows: int, hopper: bool) -> Plans:
    plan = GroupedPlan(rows, *(_HOPPER if hopper else _OTHERS)[rows])
    return Plans(plan, plan)


def columns_at_a_time(columns: int) -> int:
    """The power of two from 256 to 1024 that leaves least to mask; of equals the largest."""
    return min((1024, 512, 256), key=lambda block: -columns % block)


def candidates(plans: Plans, top_k: int, sizes: tuple[int, int]) -> Iterator[Plans]:
    """What is worth measuring in place of ``plans``, on Hopper: the other ways as they are chosen
    there, then one product exchanged at a time."""
    yield pair_plans(top_k, sizes)
    yield from (tile_plans(rows, hopper=True) for rows in TILE_ROWS)
    for name in ("up", "down"):
        plan = getattr(plans, name)
        for other in _pair_tiles(plan) if isinstance(plan, PairPlan) else _grouped_tiles(plan):
            yield replace(plans, **{name: other})


def _pair_tiles(plan: PairPlan) -> Iterator[PairPlan]:
    for block_n, warps in ((1, 1), (2, 1), (2, 2), (4, 2), (4, 4), (8, 4)):
        for block_k in sorted({plan.block_k, 512, 256}):
            yield PairPlan(block_n, block_k, warps)


def _grouped_tiles(plan: GroupedPlan) -> Iterator[GroupedPlan]:
    rows = plan.block_m
    for block_n, block_k, warps, swap in (
        *((64, 128, 4, True), (64, 64, 4, True), (128, 128, 4, True), (128, 64, 4, True)),
        *((128, 128, 8, True), (256, 64, 8, True), (64, 128, 4, False), (128, 64, 4, False)),
        *((128, 64, 8, False), (256, 64, 8, False)),
    ):
        for stages in (3, 4, 5):
            other = GroupedPlan(rows, block_n, block_k, warps, stages, swap)
            if (swap or rows >= 64) and other.shared_memory() <= SHARED_MEMORY:
                yield other
