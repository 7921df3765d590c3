"""Run by test_triton_compile.py in a process of its own: compiles for Hopper, prints JSON."""

from __future__ import annotations

import json
from dataclasses import replace

import torch

from octavo.ops.triton import (
    expand,
    int8,
    moe_packed,
    packed,
    packed_gemv,
    packed_inputs,
    rounding,
)
from octavo.ops.triton.moe_sort import Sorted
from octavo.ops.triton.packed import Layout, Packed
from octavo.ops.triton.packed_plans import BUCKETS, choose, rounded_plan, rows_of_tile
from octavo.ops.triton.packed_skinny import packed_skinny
from octavo.ops.weights import Outliers
from tests.fixtures.triton_aot import described, recorded
from tests.ops.compile_linear import meta

E4M3 = torch.float8_e4m3fn
N, K = 6144, 4096


def words(layout: Layout, rows: int, eight_bit: torch.dtype = E4M3) -> Packed:
    """As ``pack`` would make them."""
    dtype = eight_bit if layout.bits == 0 else torch.int16
    blocks = -(-rows // layout.row_block)
    half = torch.float32 if layout.bits == 0 else torch.float16
    shift_type = torch.uint8 if layout.shift == packed.ZEROS else half
    shifts = meta(blocks, layout.groups, dtype=shift_type) if layout.shift else None
    entries = (1 << layout.bits,)
    if layout.table == packed.ROW_TABLE:
        entries = (rows, *entries)
    return Packed(
        layout,
        meta(rows, layout.row_words, dtype=dtype),
        meta(blocks, layout.groups, dtype=half),
        shifts,
        meta(*entries, dtype=torch.float32) if layout.table else None,
        None,
        None,
    )


def layouts() -> list[Layout]:
    found = [Layout(0, K, 128), Layout(0, K, 128, 128, K // 128, 128)]
    for bits in (2, 3, 4, 8):
        for shift in (packed.NO_SHIFT, packed.ZEROS, packed.MINIMUMS):
            zero = 0 if shift == packed.ZEROS else 1 << (bits - 1)
            found.append(Layout(bits, K, 64, 128, K // 128, 1, zero, shift))
    found.append(Layout(4, K, 32, 32, K // 32, table=packed.SHARED_TABLE))
    found.append(Layout(3, K, 64, table=packed.ROW_TABLE))
    return found


def launch_all(weight: Packed, dtype: torch.dtype) -> None:
    layout = weight.layout
    for bucket in BUCKETS:
        plan = choose(layout, N, "none", bucket, hopper=True)
        x, y = meta(bucket, K, dtype=dtype), meta(bucket, N, dtype=dtype)
        operands = (weight, meta(N), meta(bucket, N), None, y)
        if plan.kind == "gemv":
            packed_gemv.packed_gemv(plan, x, *operands, False, 1)
            if layout.bits in (2, 4, 8) and not layout.table:
                packed_gemv.packed_gemv(replace(plan, half=True), x, *operands, False, 1)
        elif plan.kind == "skinny" and bucket in (16, 64):
            arrived = meta(1000, dtype=torch.int32)
            packed_skinny(plan, min(bucket, rows_of_tile(layout)), x, *operands, arrived, False, 2)
    expand.expand(weight, meta(256, K, dtype=dtype))


def launch_rounded(dtype: torch.dtype, layout: Layout) -> None:
    weight = words(layout, 2 * N, dtype)
    for rows in (16, 32, 64):
        plan = rounded_plan(layout, 2 * N, "silu_mul", rows, hopper=True)
        x, y = meta(rows, K, dtype=dtype), meta(rows, N)
        scales = meta(rows, layout.groups, dtype=torch.float32)
        arrived = meta(1000, dtype=torch.int32)
        packed_skinny(plan, rows, x, weight, None, None, None, y, arrived, True, 2, scales)
        rounding.rounded(meta(rows, K), dtype, 2, layout.group)


def launch_experts() -> None:
    count, hidden, inner = 8, 2048, 768
    layout = Layout(4, hidden, 64, 128, hidden // 128, 1, 8)
    one = words(layout, 2 * inner)
    tensors = (one.words, one.scales)
    room = [meta(count, *tensor.shape, dtype=tensor.dtype) for tensor in tensors]
    stack = moe_packed.Stack(replace(one, words=room[0], scales=room[1]), hidden)
    for rows in (16, 64):
        order, experts = meta(9 * rows, dtype=torch.int32), meta(9, dtype=torch.int32)
        pairs = Sorted(order, experts, rows)
        plan = moe_packed.plan_of(rows)
        moe_packed.grouped(plan, meta(100, hidden), stack, None, meta(200, inner), pairs, 2)


def main() -> None:
    with recorded() as launches:
        for layout in layouts():
            launch_all(words(layout, N), torch.bfloat16)
        launch_all(words(Layout(4, K, 64, 128, K // 128, 1, 8), N), torch.float16)
        launch_rounded(E4M3, Layout(0, K, 128))
        launch_rounded(E4M3, Layout(0, K, 128, 128, K // 128, 128))
        launch_experts()
        launch_rounded(torch.int8, Layout(0, K, 128))
        weight = words(Layout(4, K, 64, table=packed.SHARED_TABLE), N)
        starts, columns = meta(N + 1, dtype=torch.int32), meta(9999, dtype=torch.int32)
        outliers = Outliers(starts, columns, meta(9999, dtype=torch.float32))
        gather = meta(K, dtype=torch.int32)
        weight = Packed(*list(vars(weight).values())[:5], gather, outliers)
        packed_inputs.outlier_products(weight, packed_inputs.gathered(weight, meta(8, K), 2), 2)
        expand.expand(weight, meta(64, K), ids=meta(64, dtype=torch.int64))
        sums, scales = meta(100, N, dtype=torch.int32), meta(N, dtype=torch.float32)
        int8.finish_kernel[(100, 3)](
            sums, scales, scales, sums, sums, meta(100, N // 2), N // 2,
            BLOCK=1024, BIAS=False, ADD=False, SILU=True, num_warps=4,
        )  # fmt: skip
    for launch in launches:
        print(json.dumps(described(launch)), flush=True)


if __name__ == "__main__":
    main()
