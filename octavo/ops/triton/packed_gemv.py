"""One row times packed weights, with plain multiply-adds in FP32.

As ``gemv.py``, but a word has several codes: a thread multiplies each with the inputs of its plane,
adds up what shares a scale, and scales once. What codes lack to numbers around zero (``decode.py``)
is a product with sums of inputs, which all rows of a thread share.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from octavo.ops.triton.decode import (
    COMPILED,
    add_half_products,
    fields_of,
    half_pairs,
    half_sums,
    load_chunks,
    numbers,
    offset,
    shared_fields,
    words_of,
)
from octavo.ops.triton.launch import options
from octavo.ops.triton.packed import Layout, Packed
from octavo.ops.triton.packed_plans import PackedPlan


@triton.jit
def _inputs(
    x_ptr, start, FIELD: tl.constexpr, HALF: tl.constexpr, WIDTH: tl.constexpr,
    PAIRS: tl.constexpr, BITS: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """FP32: the inputs that a field of words is multiplied with. Both halves of a word's come with
    one load, which the compiler makes once."""
    at = start + FIELD * WIDTH
    if BITS == 0:
        x_words = x_ptr
    else:
        x_words = x_ptr.to(tl.pointer_type(tl.int32))
    if MASKED:
        x = tl.load(x_words + at, mask=at < PAIRS, other=0)
    else:
        x = tl.load(x_words + at)
    if BITS > 0:
        x = (x >> (16 * HALF)).to(tl.int16).to(x_ptr.dtype.element_ty, bitcast=True)
    return x.to(tl.float32)


@triton.jit
def _add_scaled(
    acc, products, shift_sums, places, scales_ptr, shifts_ptr,
    REDUCE: tl.constexpr, SCALED: tl.constexpr, SHIFT: tl.constexpr,
):  # fmt: skip
    """acc + the products of a thread's words times their scale. places: of the scales, for each
    REDUCE words of each row, [words, rows]: so Triton has neighbouring threads load for
    neighbouring words, as they hold the products."""
    ROWS: tl.constexpr = products.shape[0]
    PARTS: tl.constexpr = products.shape[1] // REDUCE
    part = tl.sum(tl.reshape(products, (ROWS, PARTS, REDUCE)), 2)
    if SHIFT != 0:
        of_inputs = tl.sum(tl.reshape(shift_sums, (PARTS, REDUCE)), 1)[None, :]
        shifts = tl.trans(tl.load(shifts_ptr + places)).to(tl.float32)
    if SHIFT == 1:
        part -= shifts * of_inputs
    if SCALED:
        acc += part * tl.trans(tl.load(scales_ptr + places)).to(tl.float32)
    else:
        acc += part
    if SHIFT == 2:
        acc += shifts * of_inputs
    return acc


@triton.jit
def _powers(
    x_ptr, start, FIELDS: tl.constexpr, WIDTH: tl.constexpr, PAIRS: tl.constexpr,
    BITS: tl.constexpr, REDUCE: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """The power of two at or below the largest input of a thread's words, FP32 [words / REDUCE],
    and its inverse [words]: inputs divided by it lie within -2 .. 2."""
    WORDS: tl.constexpr = start.shape[0]
    PARTS: tl.constexpr = WORDS // REDUCE
    largest = tl.zeros((WORDS,), tl.float32)
    for field in tl.static_range(FIELDS):
        for half in tl.static_range(2):
            x = _inputs(x_ptr, start, field, half, WIDTH, PAIRS, BITS, MASKED)
            largest = tl.maximum(largest, tl.abs(x))
    largest = tl.max(tl.reshape(largest, (PARTS, REDUCE)), 1)
    bits = largest.to(tl.int32, bitcast=True) & 0x7F800000
    inverse = (0x7F000000 - bits).to(tl.float32, bitcast=True)
    inverse = tl.reshape(tl.broadcast_to(inverse[:, None], (PARTS, REDUCE)), (WORDS,))
    return bits.to(tl.float32, bitcast=True), inverse


@triton.jit
def _add_scaled_half(
    acc, sums, powers, shift_sums, places, scales_ptr, shifts_ptr,
    REDUCE: tl.constexpr, SCALED: tl.constexpr, SHIFT: tl.constexpr, CENTER: tl.constexpr,
):  # fmt: skip
    """As ``_add_scaled``, of sums in FP16 of inputs divided by ``powers``."""
    part = half_sums(sums, REDUCE) * powers[None, :]
    if SHIFT != 0:
        PARTS: tl.constexpr = shift_sums.shape[0] // REDUCE
        of_inputs = tl.sum(tl.reshape(shift_sums, (PARTS, REDUCE)), 1)[None, :]
        shifts = tl.trans(tl.load(shifts_ptr + places)).to(tl.float32)
    if SHIFT == 1:
        part -= (shifts - CENTER) * of_inputs
    if SCALED:
        acc += part * tl.trans(tl.load(scales_ptr + places)).to(tl.float32)
    else:
        acc += part
    if SHIFT == 2:
        acc += shifts * of_inputs
    return acc


@triton.jit
def packed_gemv_kernel(
    x_ptr, w_ptr, scales_ptr, shifts_ptr, table_ptr, bias_ptr, other_ptr, extra_ptr, y_ptr, n,
    PAIRS: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr, BITS: tl.constexpr,
    GROUP: tl.constexpr, GROUPS: tl.constexpr, ROW_BLOCK: tl.constexpr, ZERO: tl.constexpr,
    SHIFT: tl.constexpr, TABLE: tl.constexpr, SCALE: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_W: tl.constexpr, REDUCE: tl.constexpr,
    BIAS: tl.constexpr, ADD: tl.constexpr, EXTRA: tl.constexpr, SILU: tl.constexpr,
    HALF: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """y[n] = w[n, INPUTS] @ x[INPUTS]. With SILU, w has 2n rows: the gate's, then the up
    projection's. A program takes BLOCK_N rows, BLOCK_W words at a time, and adds REDUCE neighbours
    up in a thread. A word is FP8's value, or two of 16 bits: COLUMNS, WIDTH, PAIRS count those two
    as one, of words of a row's plane, of a plane in a chunk, and of inputs. HALF: products of
    a thread's words are added up in FP16, two at a time."""
    if PDL == 1:
        gdc_launch_dependents()
    FIELDS: tl.constexpr = fields_of(BITS)
    PARTS: tl.constexpr = words_of(BITS)
    HALVES: tl.constexpr = 1 if BITS == 0 else 2
    SHARED: tl.constexpr = shared_fields(BITS, WIDTH * HALVES, GROUP)
    OFFSET: tl.constexpr = BITS > 0 and TABLE == 0
    SCALED: tl.constexpr = SCALE and GROUP > 0  # else in the end
    ROW_WORDS: tl.constexpr = COLUMNS * PARTS
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = rows < n
    rows = tl.minimum(rows, n - 1)  # so that loads need no mask
    up_rows = rows + n
    table_rows = table_ptr + (rows * (1 << BITS))[:, None] if TABLE == 2 else table_ptr
    up_tables = table_ptr + (up_rows * (1 << BITS))[:, None] if TABLE == 2 else table_ptr
    acc = tl.zeros((BLOCK_N, BLOCK_W // REDUCE), tl.float32)
    up_acc = tl.zeros((BLOCK_N, BLOCK_W // REDUCE), tl.float32)
    CENTER: tl.constexpr = (1 << (BITS - 1)) if SHIFT == 1 else ZERO
    STEPS: tl.constexpr = (COLUMNS + BLOCK_W - 1) // BLOCK_W
    for i in tl.static_range(STEPS):
        columns = i * BLOCK_W + tl.arange(0, BLOCK_W)
        if PARTS == 1:
            at = columns
        else:
            at = columns // WIDTH * (PARTS * WIDTH) + columns % WIDTH
        present = (columns < COLUMNS)[None, :]
        tiles = w_ptr + rows[:, None].to(tl.int64) * ROW_WORDS + at[None, :]
        first, second, high = load_chunks(tiles, present, BITS, WIDTH, (i + 1) * BLOCK_W > COLUMNS)
        if SILU:
            tiles += tl.cast(n, tl.int64) * ROW_WORDS
            up_first, up_second, up_high = load_chunks(
                tiles, present, BITS, WIDTH, (i + 1) * BLOCK_W > COLUMNS
            )
        if i == 0 and PDL != 0:
            gdc_wait()
        start = columns // WIDTH * (FIELDS * WIDTH) + columns % WIDTH
        groups = i * BLOCK_W + tl.arange(0, BLOCK_W // REDUCE) * REDUCE
        groups = groups // WIDTH * (FIELDS * WIDTH)
        if HALF:
            powers, inverse = _powers(
                x_ptr, start, FIELDS, WIDTH, PAIRS, BITS, REDUCE,
                (i + 1) * BLOCK_W > COLUMNS or COLUMNS * FIELDS > PAIRS,
            )  # fmt: skip
        for shared in tl.static_range(0, FIELDS, SHARED):
            sums = tl.zeros((BLOCK_W,), tl.float32)
            shift_sums = tl.zeros((BLOCK_W,), tl.float32)
            if HALF:
                half_total = tl.zeros((BLOCK_N, BLOCK_W), tl.int32 if COMPILED else tl.float32)
                up_half_total = half_total
                for field in tl.static_range(shared, shared + SHARED):
                    even = _inputs(
                        x_ptr, start, field, 0, WIDTH, PAIRS, BITS,
                        (i + 1) * BLOCK_W > COLUMNS or COLUMNS * FIELDS > PAIRS,
                    )  # fmt: skip
                    odd = _inputs(
                        x_ptr, start, field, 1, WIDTH, PAIRS, BITS,
                        (i + 1) * BLOCK_W > COLUMNS or COLUMNS * FIELDS > PAIRS,
                    )  # fmt: skip
                    if SHIFT != 0:
                        shift_sums += even + odd
                    pair, pair_odd = half_pairs(even * inverse, odd * inverse)
                    half_total = add_half_products(
                        half_total, first, pair[None, :], pair_odd[None, :], field, BITS, CENTER
                    )
                    if SILU:
                        up_half_total = add_half_products(
                            up_half_total, up_first, pair[None, :], pair_odd[None, :], field, BITS,
                            CENTER,
                        )  # fmt: skip
            else:
                if OFFSET or SHIFT != 0:
                    for field in tl.static_range(shared, shared + SHARED):
                        for half in tl.static_range(HALVES):
                            x = _inputs(
                                x_ptr, start, field, half, WIDTH, PAIRS, BITS,
                                (i + 1) * BLOCK_W > COLUMNS or COLUMNS * FIELDS > PAIRS,
                            )  # fmt: skip
                            sums -= x * (offset(field, half, BITS) + ZERO)
                            shift_sums += x
                products = tl.broadcast_to(sums[None, :], (BLOCK_N, BLOCK_W))
                up_products = products
                for field in tl.static_range(shared, shared + SHARED):
                    for half in tl.static_range(HALVES):
                        x = _inputs(
                            x_ptr, start, field, half, WIDTH, PAIRS, BITS,
                            (i + 1) * BLOCK_W > COLUMNS or COLUMNS * FIELDS > PAIRS,
                        )[None, :]  # fmt: skip
                        found = numbers(first, second, high, table_rows, field, half, BITS, TABLE)
                        products += found * x
                        if SILU:
                            found = numbers(
                                up_first, up_second, up_high, up_tables, field, half, BITS, TABLE
                            )
                            up_products += found * x
            if GROUP > 0:
                group = tl.minimum((groups + shared * WIDTH) * HALVES // GROUP, GROUPS - 1)
            else:
                group = groups * 0
            places = (rows // ROW_BLOCK * GROUPS)[None, :] + group[:, None]
            if HALF:
                acc = _add_scaled_half(
                    acc, half_total, powers, shift_sums, places, scales_ptr, shifts_ptr,
                    REDUCE, SCALED, SHIFT, CENTER,
                )  # fmt: skip
            else:
                acc = _add_scaled(
                    acc, products, shift_sums, places, scales_ptr, shifts_ptr, REDUCE, SCALED, SHIFT
                )
            if SILU:
                places = (up_rows // ROW_BLOCK * GROUPS)[None, :] + group[:, None]
                if HALF:
                    up_acc = _add_scaled_half(
                        up_acc, up_half_total, powers, shift_sums, places, scales_ptr, shifts_ptr,
                        REDUCE, SCALED, SHIFT, CENTER,
                    )  # fmt: skip
                else:
                    up_acc = _add_scaled(
                        up_acc, up_products, shift_sums, places, scales_ptr, shifts_ptr,
                        REDUCE, SCALED, SHIFT,
                    )  # fmt: skip
    if PDL == 2:
        gdc_launch_dependents()

    y = tl.sum(acc, 1)
    y_up = tl.sum(up_acc, 1)
    if SCALE and not SCALED:
        y *= tl.load(scales_ptr + rows // ROW_BLOCK).to(tl.float32)
        if SILU:
            y_up *= tl.load(scales_ptr + up_rows // ROW_BLOCK).to(tl.float32)
    if BIAS:
        y += tl.load(bias_ptr + rows).to(tl.float32)
        if SILU:
            y_up += tl.load(bias_ptr + up_rows).to(tl.float32)
    if EXTRA:
        y += tl.load(extra_ptr + rows)
        if SILU:
            y_up += tl.load(extra_ptr + up_rows)
    if SILU:
        y = y / (1.0 + tl.exp(-y)) * y_up
    if ADD:
        y += tl.load(other_ptr + rows).to(tl.float32)
    tl.store(y_ptr + rows, y.to(y_ptr.dtype.element_ty), mask=inside)


def reduced(layout: Layout, block_w: int) -> int:
    """Words that a thread loads at once and adds up: of one plane, so of one group."""
    if layout.bits == 0:
        return min(16, layout.width, block_w)
    return min(4, layout.width // 2, block_w)


def packed_gemv(
    plan: PackedPlan, x: Tensor, packed: Packed, bias: Tensor | None, other: Tensor | None,
    extra: Tensor | None, y: Tensor, silu: bool, pdl: int,
) -> None:  # fmt: skip
    """x: [1, inputs]; other, y: [1, N], or [1, N / 2] with ``silu``. extra: FP32 [1, N], what is
    added before the epilogue."""
    n, layout, known = y.shape[1], packed.layout, constants(packed)
    pairs, words, halves = known.pop("INPUTS"), packed.words, 1
    if layout.bits:
        words, halves = words.view(torch.int32), 2
    packed_gemv_kernel[(triton.cdiv(n, plan.block_n),)](
        x, words, *operands(packed, x), x if bias is None else bias,
        x if other is None else other, x if extra is None else extra, y, n,
        **known | {"COLUMNS": known["COLUMNS"] // halves, "WIDTH": layout.width // halves},
        PAIRS=pairs // halves, BLOCK_N=plan.block_n, BLOCK_W=plan.block_k,
        REDUCE=reduced(layout, plan.block_k), BIAS=bias is not None, ADD=other is not None,
        EXTRA=extra is not None, SILU=silu,
        HALF=plan.half and layout.bits in (2, 4, 8) and not layout.table, PDL=pdl,
        **options(plan.num_warps, pdl),
    )  # fmt: skip


def operands(packed: Packed, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Scales, shifts and table; x stands for those that are not there and not read."""
    found = (packed.scales, packed.shifts, packed.table)
    return tuple(x if tensor is None else tensor for tensor in found)  # type: ignore[return-value]


def constants(packed: Packed) -> dict[str, int | bool]:
    layout = packed.layout
    return {
        "INPUTS": layout.inputs,
        "COLUMNS": layout.inputs if layout.bits == 0 else layout.columns,
        "WIDTH": layout.width,
        "BITS": layout.bits,
        "GROUP": layout.group,
        "GROUPS": layout.groups,
        "ROW_BLOCK": layout.row_block,
        "ZERO": layout.zero,
        "SHIFT": layout.shift,
        "TABLE": layout.table,
        "SCALE": packed.scales is not None,
    }
