"""Some rows times packed weights, on tensor cores.

As ``skinny.py``: weights are read once for up to 64 rows, more rows are tiles of 64. A tile of
words becomes, field by field, tiles of numbers in registers, each multiplied with the inputs of its
plane. Whole numbers stay exact in 16 bits and are scaled after the product of a group (``exact``),
or they are scaled before it and rounded.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from octavo.ops.triton.decode import (
    fields_of,
    load_chunks,
    numbers,
    scaled,
    shared_fields,
    whole,
    words_of,
)
from octavo.ops.triton.launch import INTERPRETED, has_wgmma, options
from octavo.ops.triton.packed import Layout, Packed
from octavo.ops.triton.packed_gemv import constants, operands
from octavo.ops.triton.packed_plans import PackedPlan
from octavo.ops.triton.plans import SHARED_MEMORY


@triton.jit
def product(w, x, acc, SWAP: tl.constexpr):
    """acc + w[BLOCK_N, k] @ x[BLOCK_M, k].T where SWAP, else its transpose."""
    if SWAP:
        acc = tl.dot(w, tl.trans(x), acc, out_dtype=acc.dtype)
    else:
        acc = tl.dot(x, tl.trans(w), acc, out_dtype=acc.dtype)
    return acc


@triton.jit
def by_output(values, SWAP: tl.constexpr):
    """values: of the rows of the weight, to be multiplied with accumulators."""
    if SWAP:
        values = values[:, None]
    else:
        values = values[None, :]
    return values


@triton.jit
def multiply(
    acc, x_tiles, x_rows, w_tiles, table_rows, scales, shifts, x_scales, gather, first_step,
    last_step,
    INPUTS: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr, BITS: tl.constexpr,
    GROUP: tl.constexpr, GROUPS: tl.constexpr, ZERO: tl.constexpr, SHIFT: tl.constexpr,
    TABLE: tl.constexpr, SCALE: tl.constexpr, BLOCK_W: tl.constexpr, EXACT: tl.constexpr,
    SWAP: tl.constexpr, X_SCALED: tl.constexpr, NATIVE: tl.constexpr, GATHER: tl.constexpr,
):  # fmt: skip
    """acc + the product over steps of BLOCK_W columns of words.

    x_tiles: pointers to the rows of x [BLOCK_M, 1]; x_rows: which of them there are. w_tiles: to
    the rows of words [BLOCK_N, 1]; table_rows: to their tables; scales, shifts: to their first ones
    [BLOCK_N]; x_scales: to the scales of x's groups [BLOCK_M], where X_SCALED. NATIVE: x and the
    words are of one 8-bit type, which is multiplied as it is. GATHER: the weight's inputs are found
    in x at ``gather``, where that is not negative.
    """
    FIELDS: tl.constexpr = fields_of(BITS)
    PARTS: tl.constexpr = words_of(BITS)
    SHARED: tl.constexpr = shared_fields(BITS, WIDTH, GROUP)
    MASKED: tl.constexpr = COLUMNS % BLOCK_W != 0
    PADDED: tl.constexpr = MASKED or COLUMNS * FIELDS > INPUTS
    GROUPED: tl.constexpr = GROUP > 0 and (SCALE or X_SCALED)
    ROUNDED: tl.constexpr = GROUPED and (SHIFT == 2 or not EXACT)  # scaled before the product
    WHOLE: tl.constexpr = BITS > 0 and TABLE == 0
    local = tl.arange(0, BLOCK_W)
    for step in tl.range(first_step, last_step):
        columns = step * BLOCK_W + local
        at = columns if PARTS == 1 else columns // WIDTH * (PARTS * WIDTH) + columns % WIDTH
        present = (columns < COLUMNS)[None, :]
        first, second, high = load_chunks(w_tiles + at[None, :], present, BITS, WIDTH, MASKED)
        start = columns // WIDTH * (FIELDS * WIDTH) + columns % WIDTH
        for field in tl.static_range(FIELDS):
            inputs = (start + field * WIDTH)[None, :]
            if GATHER:
                found = tl.load(gather + inputs, mask=inputs < INPUTS, other=-1)
                x = tl.load(x_tiles + found, mask=x_rows & (found >= 0), other=0.0)
            elif PADDED:
                x = tl.load(x_tiles + inputs, mask=x_rows & (inputs < INPUTS), other=0.0)
            else:
                x = tl.load(x_tiles + inputs, mask=x_rows, other=0.0)
            if (
                not NATIVE and x.dtype.primitive_bitwidth == 8
            ):  # interpreted: it lacks such products
                x = x.to(tl.float32)
            if field % SHARED == 0:
                if GROUPED:
                    group = (step * (BLOCK_W * FIELDS) + field * WIDTH) // GROUP
                    group = tl.minimum(group, GROUPS - 1)
                    if SCALE:
                        scale = tl.load(scales + group).to(tl.float32)
                if SHIFT != 0:
                    shift = tl.load(shifts + group).to(tl.float32)
                part = tl.zeros_like(acc)
            if NATIVE:
                w = first
            elif WHOLE:
                of_rows = shift[:, None] if SHIFT == 1 else 0.0
                w = whole(first, second, high, of_rows, field, BITS, ZERO, SHIFT == 1, x.dtype)
                if ROUNDED:
                    minimum = shift[:, None] if SHIFT == 2 else scale[:, None] * 0.0
                    w = scaled(w, scale[:, None], minimum, x.dtype)
            else:
                w = numbers(first, second, high, table_rows, field, 0, BITS, TABLE)
                if ROUNDED:
                    w *= scale[:, None]
                w = w.to(x.dtype)
            if GROUPED and not ROUNDED:
                part = product(w, x, part, SWAP)
                if field % SHARED == SHARED - 1:
                    if SCALE:
                        part *= by_output(scale, SWAP)
                    if X_SCALED:
                        part *= by_output(tl.load(x_scales + group), not SWAP)
                    acc += part
            else:
                acc = product(w, x, acc, SWAP)
    return acc


@triton.jit(do_not_specialize=["m", "steps"])
def packed_skinny_kernel(
    x_ptr, w_ptr, scales_ptr, shifts_ptr, table_ptr, bias_ptr, other_ptr, extra_ptr, x_scales_ptr,
    y_ptr, parts_ptr, arrived_ptr, m, n, steps,
    INPUTS: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr, BITS: tl.constexpr,
    GROUP: tl.constexpr, GROUPS: tl.constexpr, ROW_BLOCK: tl.constexpr, ZERO: tl.constexpr,
    SHIFT: tl.constexpr, TABLE: tl.constexpr, SCALE: tl.constexpr, X_GROUPS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_W: tl.constexpr, SPLIT_K: tl.constexpr,
    EXACT: tl.constexpr, SWAP: tl.constexpr, NATIVE: tl.constexpr, WHOLE: tl.constexpr,
    BIAS: tl.constexpr, ADD: tl.constexpr, EXTRA: tl.constexpr, SILU: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """y[m, n] = x[m, INPUTS] @ w[n, INPUTS].T; a program takes BLOCK_M rows of x, BLOCK_N of w and
    ``steps`` times BLOCK_W columns of words.

    With SILU, w has 2n rows, and a tile is BLOCK_N / 2 of the gate's and the up projection's of the
    same outputs. X_GROUPS: scales of a row of x, 0 for none. WHOLE: x and w are int8, and so are
    their sums int32.
    """
    if PDL == 1:
        gdc_launch_dependents()
    OUTPUTS: tl.constexpr = BLOCK_N // 2 if SILU else BLOCK_N
    ROW_WORDS: tl.constexpr = COLUMNS * words_of(BITS)
    row_tile, tile, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    local = tl.arange(0, BLOCK_N)
    w_rows = tl.minimum(tile * OUTPUTS + local % OUTPUTS, n - 1)  # so that loads need no mask
    if SILU:
        w_rows += local // OUTPUTS * n
    outputs = tile * OUTPUTS + tl.arange(0, OUTPUTS)
    rows = row_tile * BLOCK_M + tl.arange(0, BLOCK_M)
    places = rows[:, None].to(tl.int64) * n + outputs[None, :]
    stored = (rows < m)[:, None] & (outputs < n)[None, :]
    scaled_rows = w_rows // ROW_BLOCK * GROUPS
    table_rows = table_ptr + (w_rows * (1 << BITS))[:, None] if TABLE == 2 else table_ptr
    if BIAS:
        bias = tl.load(bias_ptr + w_rows).to(tl.float32)
    if PDL != 0:
        gdc_wait()

    SUMS: tl.constexpr = tl.int32 if WHOLE else tl.float32
    if SWAP:
        acc = tl.zeros((BLOCK_N, BLOCK_M), SUMS)
    else:
        acc = tl.zeros((BLOCK_M, BLOCK_N), SUMS)
    all_steps: tl.constexpr = (COLUMNS + BLOCK_W - 1) // BLOCK_W
    x_scales = x_scales_ptr + tl.minimum(rows, m - 1) * X_GROUPS
    acc = multiply(
        acc, x_ptr + rows[:, None].to(tl.int64) * INPUTS, (rows < m)[:, None],
        w_ptr + w_rows[:, None].to(tl.int64) * ROW_WORDS, table_rows, scales_ptr + scaled_rows,
        shifts_ptr + scaled_rows, x_scales, x_scales_ptr, split * steps,
        tl.minimum(split * steps + steps, all_steps),
        INPUTS, COLUMNS, WIDTH, BITS, GROUP, GROUPS, ZERO, SHIFT, TABLE, SCALE, BLOCK_W, EXACT,
        SWAP, X_GROUPS > 1, NATIVE, False,
    )  # fmt: skip
    if PDL == 2:
        gdc_launch_dependents()
    if not SWAP:
        acc = tl.trans(acc)
    acc = acc.to(tl.float32)

    last = True
    if SPLIT_K > 1:
        SIZE: tl.constexpr = BLOCK_N * BLOCK_M
        tile += row_tile * tl.num_programs(1)
        inner = local[:, None] * BLOCK_M + tl.arange(0, BLOCK_M)[None, :]
        parts = parts_ptr + tile.to(tl.int64) * (SPLIT_K * SIZE) + inner
        tl.store(parts + split * SIZE, acc)
        tl.debug_barrier()  # all of this program's stores, before it says it has arrived
        arrived = tl.atomic_add(arrived_ptr + tile, 1, sem="acq_rel", scope="gpu")
        last = arrived == SPLIT_K - 1
        if last:
            acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
            for i in tl.static_range(SPLIT_K):
                acc += tl.load(parts + i * SIZE, cache_modifier=".cg")
            tl.store(arrived_ptr + tile, 0)
    if last:
        if SCALE and GROUP == 0:
            acc *= tl.load(scales_ptr + scaled_rows).to(tl.float32)[:, None]
        if X_GROUPS == 1:
            acc *= tl.load(x_scales)[None, :]
        if BIAS:
            acc += bias[:, None]
        if EXTRA:
            width = n * 2 if SILU else n
            extra = extra_ptr + rows[None, :].to(tl.int64) * width + w_rows[:, None]
            acc += tl.load(extra, mask=(rows < m)[None, :], other=0.0)
        if SILU:
            pairs = tl.permute(tl.reshape(acc, (2, OUTPUTS, BLOCK_M)), (1, 2, 0))
            gate, up = tl.split(pairs)
            y = tl.trans(gate / (1.0 + tl.exp(-gate)) * up)
        else:
            y = tl.trans(acc)
        if ADD:
            y += tl.load(other_ptr + places, mask=stored, other=0.0).to(tl.float32)
        tl.store(y_ptr + places, y.to(y_ptr.dtype.element_ty), mask=stored)


def words_at_a_time(layout: Layout, plan: PackedPlan) -> int:
    """Columns of words of a tile: of one plane, or more where that leaves each tile one scale."""
    if layout.bits == 0:
        if layout.group == 0:
            return plan.block_k
        return min(plan.block_k, layout.group & -layout.group)
    wanted = max(1, plan.block_k // layout.width) if layout.fields <= 4 else 1
    while wanted > 1 and layout.group % (wanted * layout.fields * layout.width):
        wanted //= 2
    return wanted * layout.width


def shared_memory() -> int:
    """Bytes for tiles in flight; before Hopper what every card from 8.0 on has."""
    return (SHARED_MEMORY if has_wgmma() else 99 << 10) - (4 << 10)


def stages_that_fit(
    plan: PackedPlan, packed: Packed, block_m: int, block_w: int, x_bytes: int
) -> int:
    """The plan's stages, or as many as there is room for. Numbers from tables are in flight too,
    and their codes twice as long."""
    layout = packed.layout
    words = plan.block_n * (3 if layout.bits == 3 else 1) * packed.words.element_size()
    size = words + layout.fields * block_m * x_bytes
    if layout.table:
        size += words + layout.fields * plan.block_n * 4
    return max(1, min(plan.num_stages, shared_memory() // (size * block_w)))


def tiles(plan: PackedPlan, n: int, silu: bool) -> int:
    """Programs along n; ``n``: columns of the output."""
    return -(-n // (plan.block_n // 2 if silu else plan.block_n))


def packed_skinny(
    plan: PackedPlan, block_m: int, x: Tensor, packed: Packed, bias: Tensor | None,
    other: Tensor | None, extra: Tensor | None, y: Tensor, arrived: Tensor, silu: bool, pdl: int,
    x_scales: Tensor | None = None,
) -> None:  # fmt: skip
    """x: [M, inputs], of 16 bits, or of the words' 8-bit type with x_scales, FP32 [M, groups].
    other, y: [M, N], or [M, N / 2] with ``silu``; extra: FP32 [M, N], added before the epilogue.
    arrived: int32 zeros, one per tile; zeros again after."""
    (rows, n), layout = y.shape, packed.layout
    count, row_tiles = tiles(plan, n, silu), triton.cdiv(rows, block_m)
    known = constants(packed)
    block_w = words_at_a_time(layout, plan)
    stages = stages_that_fit(plan, packed, block_m, block_w, x.element_size())
    blocks = triton.cdiv(known["COLUMNS"], block_w)
    steps = triton.cdiv(blocks, plan.split_k)
    splits = triton.cdiv(blocks, steps)  # none of them is empty
    parts = y
    if splits > 1:
        size = count * row_tiles * splits * plan.block_n * block_m
        parts = torch.empty(size, dtype=torch.float32, device=y.device)
    eight_bit = x.dtype == packed.words.dtype
    packed_skinny_kernel[(row_tiles, count, splits)](
        x, packed.words, *operands(packed, x), x if bias is None else bias,
        x if other is None else other, x if extra is None else extra,
        x if x_scales is None else x_scales, y, parts, arrived, rows, n, steps, **known,
        X_GROUPS=0 if x_scales is None else x_scales.shape[1], BLOCK_M=block_m,
        BLOCK_N=plan.block_n, BLOCK_W=block_w, SPLIT_K=splits, EXACT=plan.exact, SWAP=plan.swap,
        NATIVE=eight_bit and not (INTERPRETED and x.is_floating_point()),
        WHOLE=x.dtype == torch.int8, BIAS=bias is not None, ADD=other is not None,
        EXTRA=extra is not None, SILU=silu, PDL=pdl,
        **options(plan.num_warps, pdl, stages),
    )  # fmt: skip
