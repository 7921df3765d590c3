"""Which kernel multiplies packed weights, by kind, shape and the number of rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from octavo.ops.linear import Epilogue
from octavo.ops.triton.packed import Layout
from octavo.ops.triton.plans import PROCESSORS

BUCKETS = (1, 16, 32, 64, 128, 256)  # rows are padded to these, above 64 to multiples of 64
ROWS_AT_A_TIME = 64


@dataclass(frozen=True)
class PackedPlan:
    """``gemv``: one row, multiply-adds. ``skinny``: tensor cores. ``expand``: the weight becomes
    16-bit numbers first, then cuBLAS.

    ``block_n``: outputs of a program (gemv), or rows of the weight (skinny); ``block_k``: words at
    a time (gemv), or inputs at a time of FP8 (skinny). ``swap``: the weights
    are the 64-row operand of the tensor cores. ``exact``: codes are multiplied as whole
    numbers and scaled then, where that is possible, instead of numbers rounded to 16 bits.
    """

    kind: Literal["gemv", "skinny", "expand"]
    block_n: int = 0
    block_k: int = 0
    num_warps: int = 0
    num_stages: int = 0
    split_k: int = 1
    swap: bool = True
    exact: bool = True


EXPAND = PackedPlan("expand")


def bucket_of(rows: int) -> int | None:
    """The bucket of so many rows; None where the weight is always expanded."""
    return next((bucket for bucket in BUCKETS if rows <= bucket), None)


def choose(layout: Layout, n: int, epilogue: Epilogue, bucket: int, hopper: bool) -> PackedPlan:
    """The plan for up to ``bucket`` rows. n: rows of the weight. hopper: there is room for more
    tiles in flight."""
    silu = epilogue == "silu_mul"
    if bucket == 1:
        return _gemv_rule(layout, n, silu)
    if bucket > 128:
        return EXPAND
    tiles = -(-n // 64)
    splits = 1
    while splits < 4 and tiles * splits * 2 <= 2 * PROCESSORS and layout.inputs // splits >= 2048:
        splits *= 2
    stages = 4 if hopper and bucket <= 32 else 3 if hopper else 2
    return PackedPlan("skinny", 64, 128, 4, stages, splits)


def _gemv_rule(layout: Layout, n: int, silu: bool) -> PackedPlan:
    if layout.bits == 0:
        block_k = 2048 if layout.inputs >= 2048 else 512
        return PackedPlan("gemv", 2 if silu else 4, block_k, 2 if silu else 4)
    wide = layout.columns >= 512
    return PackedPlan("gemv", 2 if silu else 4, 256 if wide else 128, 2 if wide else 1)


def rounded_plan(
    layout: Layout, n: int, epilogue: Epilogue, rows: int, hopper: bool
) -> PackedPlan:
    """The plan of products of weights and inputs of 8 bits."""
    tiles = -(-n // 64)
    if epilogue == "silu_mul" and rows > 32 and tiles >= 2 * PROCESSORS:
        return PackedPlan("skinny", 128, 128, 4, 4 if hopper else 2)
    splits = 2 if tiles < PROCESSORS and layout.inputs >= 2048 and rows > 16 else 1
    return PackedPlan("skinny", 64, 256, 4, (6 if rows <= 16 else 4) if hopper else 2, splits)
