"""Which kernel multiplies packed weights, by kind, shape and the number of rows.

As in ``plans.py``: what was measured on an H200 (``benchmarks/gpu/tune_quantized.py``, and inside
decode steps ``benchmarks/gpu/step.py``), and a rule of thumb for all else.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

from octavo.ops.linear import Epilogue
from octavo.ops.triton.packed import Layout
from octavo.ops.triton.plans import PROCESSORS, Shape

BUCKETS = (1, 16, 32, 64, 128, 256)  # rows are padded to these, above 64 to multiples of 64
TABLE = Path(__file__).with_name("plans_quantized_h200.json")


@dataclass(frozen=True)
class PackedPlan:
    """``gemv``: one row, multiply-adds. ``skinny``: tensor cores. ``expand``: the weight becomes
    16-bit numbers first, then cuBLAS.

    ``block_n``: outputs of a program (gemv), or rows of the weight (skinny); ``block_k``: words at
    a time (gemv), or inputs at a time of FP8 (skinny). ``swap``: the weights are the 64-row operand
    of the tensor cores. ``exact``: codes are multiplied as whole numbers and scaled then, where
    that is possible, instead of numbers rounded to 16 bits. ``half``: a GEMV adds a thread's
    products of a group up in FP16.
    """

    kind: Literal["gemv", "skinny", "expand"]
    block_n: int = 0
    block_k: int = 0
    num_warps: int = 0
    num_stages: int = 0
    split_k: int = 1
    swap: bool = True
    exact: bool = True
    half: bool = False


EXPAND = PackedPlan("expand")
ROUNDED = "rounded"  # the kind, in the table, of products of weights and inputs of 8 bits


def rows_of_tile(layout: Layout) -> int:
    """Most rows of x in a tile: the inputs of 16 planes, of 3 bits, take much room."""
    return 32 if layout.bits == 3 else 64


def bucket_of(rows: int) -> int | None:
    """The bucket of so many rows; None where the weight is always expanded."""
    return next((bucket for bucket in BUCKETS if rows <= bucket), None)


def kind_of(layout: Layout) -> str:
    """What plans tell apart: ``float8``, ``4-bit/128``, ``table-4-bit/64``, with groups if any."""
    name = f"{layout.bits}-bit" if layout.bits else "float8"
    name = f"table-{name}" if layout.table else name
    return f"{name}/{layout.group}" if layout.group else name


Table = Mapping[tuple[str, Shape, int], PackedPlan]


def read_table(path: Path) -> dict[tuple[str, Shape, int], PackedPlan]:
    """(kind, shape, bucket) -> plan."""
    return {
        (row["kind"], Shape(row["n"], row["k"], row["epilogue"]), row["rows"]): PackedPlan(
            **row["plan"]
        )
        for row in json.loads(path.read_text())["plans"]
    }


@cache
def shipped_table() -> Table:
    return read_table(TABLE)


def choose(
    layout: Layout,
    n: int,
    epilogue: Epilogue,
    bucket: int,
    hopper: bool,
    table: Table | None = None,
) -> PackedPlan:
    """The plan for up to ``bucket`` rows. n: rows of the weight. hopper: the table was measured
    there, and there is room for more tiles in flight."""
    if hopper:
        table = shipped_table() if table is None else table
        found = table.get((kind_of(layout), Shape(n, layout.inputs, epilogue), bucket))
        if found is not None:
            return found
    return rule_of_thumb(layout, n, epilogue, bucket, hopper)


def rule_of_thumb(
    layout: Layout, n: int, epilogue: Epilogue, bucket: int, hopper: bool
) -> PackedPlan:
    silu = epilogue == "silu_mul"
    if bucket == 1:
        return _gemv_rule(layout, silu)
    if layout.table or (bucket > 128 and layout.bits == 0):
        return EXPAND  # looking numbers up once costs less than doing it for each tile of rows
    splits = _splits(layout, n)
    if layout.bits == 0 and bucket == 16:
        wide = n >= 64 * PROCESSORS  # enough programs
        stages = 4 if hopper else 2
        return PackedPlan(
            "skinny", 64 if wide else 32, 128 if wide else 256, 4, stages, splits, False
        )
    stages = 4 if hopper and bucket <= 32 else 3 if hopper else 2
    return PackedPlan("skinny", 64, 128 if layout.bits == 0 else 64, 4, stages, splits)


def _splits(layout: Layout, n: int) -> int:
    """Parts of the inputs, so that about two programs run on each processor."""
    tiles, splits = -(-n // 64), 1
    while splits < 4 and tiles * splits <= 2 * PROCESSORS and layout.inputs // splits >= 2048:
        splits *= 2
    return splits


def _gemv_rule(layout: Layout, silu: bool) -> PackedPlan:
    if layout.bits == 0:
        block_k = 1024 if layout.inputs >= 1024 else 256
        return PackedPlan("gemv", 2 if silu else 4, block_k, 2 if block_k == 1024 else 1)
    if silu or layout.columns < 1024:
        return PackedPlan("gemv", 2 if silu else 4, 128, 1, half=True)
    return PackedPlan("gemv", 4, 256, 2, half=True)


def tile_of(rows: int) -> int:
    """Rows of a tile of inputs of 8 bits."""
    return 16 if rows <= 16 else 32 if rows <= 32 else 64


def rounded_plan(
    layout: Layout,
    n: int,
    epilogue: Epilogue,
    rows: int,
    hopper: bool,
    table: Table | None = None,
) -> PackedPlan:
    """The plan of products of weights and inputs of 8 bits."""
    if hopper and rows <= 64:
        table = shipped_table() if table is None else table
        found = table.get((ROUNDED, Shape(n, layout.inputs, epilogue), tile_of(rows)))
        if found is not None and layout.group == 0:
            return found
    if epilogue == "silu_mul" and n >= 128 * PROCESSORS:
        block_n = 64 if rows <= 32 else 128
        return PackedPlan("skinny", block_n, 128, 4, 4 if hopper else 2)
    if not hopper:
        return PackedPlan("skinny", 64, 128, 4, 2)
    if rows > 128:
        return PackedPlan("skinny", 128, 128, 8, 6)
    splits = 2 if layout.inputs >= 8192 and 32 < rows <= 64 else 1
    return PackedPlan("skinny", 64, 256, 4, 6 if splits == 1 and rows <= 64 else 4, splits)
