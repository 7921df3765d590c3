"""Which kernel multiplies a linear, by its shape and the number of rows.

A short table holds what was measured on an H200 (``benchmarks/gpu/tune.py`` writes it); any other
shape goes by a rule of thumb. Plans are chosen when a linear is made, never inside a step.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

from octavo.ops.linear import Epilogue

BUCKETS = (1, 16, 32, 64)  # rows are padded to these by the own kernels; above is cuBLAS
TABLE = Path(__file__).with_name("plans_h200.json")
SHARED_MEMORY = 227 << 10  # of one program on Hopper
PROCESSORS = 132


@dataclass(frozen=True)
class Shape:
    """``n``, ``k``: the weight's rows and columns; with ``silu_mul`` n counts gate and up."""

    n: int
    k: int
    epilogue: Epilogue

    @property
    def silu(self) -> bool:
        return self.epilogue == "silu_mul"


@dataclass(frozen=True)
class Plan:
    """``gemv``: one row, multiply-adds. ``skinny``: up to 64 rows on tensor cores. ``cublas``: any.

    ``block_n``: outputs of a program (gemv), or rows of the weight (skinny); ``block_k``: columns
    at a time; ``swap``: the weights are the 64-row operand of the tensor cores.
    """

    kind: Literal["gemv", "skinny", "cublas"]
    block_n: int = 0
    block_k: int = 0
    num_warps: int = 0
    num_stages: int = 0
    split_k: int = 1
    swap: bool = True

    def shared_memory(self, bucket: int) -> int:
        """Bytes of the tiles in flight of a skinny product."""
        return (self.block_n + bucket) * self.block_k * 2 * self.num_stages


CUBLAS = Plan("cublas")
# block_n, block_k, warps
_GEMV_TILES = (
    *((4, 1024, 2), (2, 1024, 2), (4, 1024, 4), (4, 2048, 4)),
    *((4, 512, 2), (8, 512, 4)),
)
# block_n, block_k, stages, warps, swap
_SKINNY_TILES = (
    *((64, 128, 6, 4, True), (64, 128, 4, 4, True), (64, 128, 3, 4, True)),
    *((128, 128, 4, 4, True), (128, 128, 3, 8, True), (128, 64, 4, 4, True)),
    *((256, 128, 3, 8, True), (64, 128, 4, 4, False), (32, 128, 4, 4, False)),
    *((32, 256, 3, 4, False), (16, 512, 3, 2, False)),
)
Table = Mapping[tuple[Shape, int], Plan]


def bucket_of(rows: int) -> int | None:
    """The bucket that so many rows are padded to; None where only cuBLAS goes."""
    return next((bucket for bucket in BUCKETS if 0 < rows <= bucket), None)


def read_table(path: Path) -> dict[tuple[Shape, int], Plan]:
    """(shape, bucket) -> plan, from what ``benchmarks/gpu/tune.py`` wrote."""
    return {
        (Shape(row["n"], row["k"], row["epilogue"]), row["rows"]): Plan(**row["plan"])
        for row in json.loads(path.read_text())["plans"]
    }


@cache
def shipped_table() -> Table:
    return read_table(TABLE)


def choose(shape: Shape, bucket: int, hopper: bool, table: Table | None = None) -> Plan:
    """The plan for up to ``bucket`` rows. ``hopper``: the tensor-core kernels were tuned for it;
    other devices leave all but one row to cuBLAS."""
    if shape.k % 8:  # rows would not start at 16 bytes
        return CUBLAS
    if not hopper:
        return rule_of_thumb(shape, 1) if bucket == 1 else CUBLAS
    found = (shipped_table() if table is None else table).get((shape, bucket))
    return found or rule_of_thumb(shape, bucket)


def rule_of_thumb(shape: Shape, bucket: int) -> Plan:
    """For shapes that nobody measured: what was best for similar ones."""
    if bucket == 1:
        return _gemv_rule(shape)
    if bucket == 64 and shape.epilogue in ("none", "add"):
        return CUBLAS
    if shape.epilogue == "logits":
        if bucket == 64:
            return Plan("skinny", 128, 64, num_warps=4, num_stages=4)
        return Plan("skinny", 64, 128, num_warps=4, num_stages=4 if bucket == 16 else 3)
    if shape.silu and shape.n >= 128 * PROCESSORS:
        return Plan("skinny", 128, 128, num_warps=4, num_stages=4)
    stages = 6 if bucket == 16 and not shape.silu else 4
    return Plan("skinny", 64, 128, num_warps=4, num_stages=stages, split_k=_splits(shape))


def _gemv_rule(shape: Shape) -> Plan:
    block_k = min(1024, 1 << (shape.k - 1).bit_length())
    if shape.k > 1024 and -(-shape.k // 512) % 2:
        block_k = 512  # half a block less to mask
    if shape.silu or shape.k >= 8192:
        return Plan("gemv", 2, block_k, num_warps=2)
    return Plan("gemv", 4, block_k, num_warps=2 if shape.n > 2048 else 4)


def _splits(shape: Shape) -> int:
    """Parts of k so that about two programs run on each processor, each with enough to do."""
    tiles = -(-shape.n // 64)
    least = 2048 if tiles >= 48 else 512
    splits = 1
    while splits < 4 and tiles * splits * 2 <= 2 * PROCESSORS and shape.k // (splits * 2) >= least:
        splits *= 2
    return splits


def candidates(shape: Shape, bucket: int) -> Iterator[Plan]:
    """What is worth measuring, cuBLAS first."""
    yield CUBLAS
    if shape.k % 8:
        return
    if bucket == 1:
        for block_n, block_k, warps in _GEMV_TILES:
            if block_k < 2 * shape.k:  # at most half of it masked
                yield Plan("gemv", block_n, block_k, warps)
        return
    for block_n, block_k, stages, warps, swap in _SKINNY_TILES:
        if block_n == 16 and (bucket > 16 or shape.silu):
            continue
        for split_k in (1, 2, 4):
            plan = Plan("skinny", block_n, block_k, warps, stages, split_k, swap)
            programs = -(-shape.n // block_n) * split_k
            useful = split_k == 1 or (programs <= 3 * PROCESSORS and shape.k // split_k >= 256)
            if useful and plan.shared_memory(bucket) <= SHARED_MEMORY:
                yield plan
