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
    half_factor,
    half_pairs,
    half_sums,
    half_unit,
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
    if BITS > 0 and x_ptr.dtype.element_ty == tl.bfloat16:  # the upper half of FP32
        x = ((x & -65536) if HALF else (x << 16)).to(tl.float32, bitcast=True)
    elif BITS > 0:
        x = (x >> (16 * HALF)).to(tl.int16).to(x_ptr.dtype.element_ty, bitcast=True)
    return x.to(tl.float32)


@triton.jit
def _load_scales(places, scales_ptr, shifts_ptr, SCALED: tl.constexpr, SHIFT: tl.constexpr):
    """Scales and shifts as they are stored, of what is not there the places. places: of the scales,
    for each REDUCE words of each row, [words, rows]: so Triton has neighbouring threads load for
    neighbouring words, as they hold the products."""
    scales, shifts = places, places
    if SCALED:
        scales = tl.load(scales_ptr + places)
    if SHIFT != 0:
        shifts = tl.load(shifts_ptr + places)
    return scales, shifts


@triton.jit
def _add_scaled(
    acc, part, of_inputs, scales, AT: tl.constexpr, SCALED: tl.constexpr, SHIFT: tl.constexpr,
    CENTER: tl.constexpr,
):  # fmt: skip
    """acc + part, [rows, parts], of codes less CENTER, times its scale. of_inputs: sums of the
    inputs of a part, [parts]. scales: what ``_load_scales`` gave, the AT-th of which is taken."""
    if SHIFT == 1:  # an FP32 whose last bits are the zero, as conversions take four times as long
        zeros = tl.trans(scales[2 * AT + 1]).to(tl.int32) | 0x4B000000
        part -= (zeros.to(tl.float32, bitcast=True) - (2.0**23 + CENTER)) * of_inputs[None, :]
    if SCALED:
        acc += part * tl.trans(scales[2 * AT]).to(tl.float32)
    else:
        acc += part
    if SHIFT == 2:
        acc += tl.trans(scales[2 * AT + 1]).to(tl.float32) * of_inputs[None, :]
    return acc


@triton.jit
def _parts(words, REDUCE: tl.constexpr):
    """[..., words] -> [..., words / REDUCE], what a thread holds added up."""
    if len(words.shape) == 1:
        found = tl.sum(tl.reshape(words, (words.shape[0] // REDUCE, REDUCE)), 1)
    else:
        shape: tl.constexpr = (words.shape[0], words.shape[1] // REDUCE, REDUCE)
        found = tl.sum(tl.reshape(words, shape), 2)
    return found


@triton.jit
def _powers(
    x_ptr, start, FIELDS: tl.constexpr, WIDTH: tl.constexpr, PAIRS: tl.constexpr,
    BITS: tl.constexpr, REDUCE: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """The power of two at or below the largest input of a thread's words, FP32 [words / REDUCE],
    and its inverse [words]: inputs divided by it lie within -2 .. 2."""
    WORDS: tl.constexpr = start.shape[0]
    PARTS: tl.constexpr = WORDS // REDUCE
    largest = tl.full((WORDS,), 2.0**-112, tl.float32)  # so that its inverse has room for factors
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
def _half_products(
    x_ptr, start, powers, inverse, words, up_words,
    FROM: tl.constexpr, SHARED: tl.constexpr, WIDTH: tl.constexpr, PAIRS: tl.constexpr,
    BITS: tl.constexpr, REDUCE: tl.constexpr, MASKED: tl.constexpr, CENTER: tl.constexpr,
    SILU: tl.constexpr,
):  # fmt: skip
    """Products of SHARED fields, the first of which is FROM, with codes less CENTER: FP32 [rows,
    parts], the same of up_words, and sums of the inputs, [parts]. They are added up in FP16, from
    the inputs times -CENTER on, so that sums stay small."""
    ROWS: tl.constexpr = words.shape[0]
    WORDS: tl.constexpr = words.shape[1]
    evens = tl.zeros((WORDS,), tl.float32)
    odds = tl.zeros((WORDS,), tl.float32)
    for field in tl.static_range(FROM, FROM + SHARED):
        evens += _inputs(x_ptr, start, field, 0, WIDTH, PAIRS, BITS, MASKED)
        odds += _inputs(x_ptr, start, field, 1, WIDTH, PAIRS, BITS, MASKED)
    UNIT: tl.constexpr = half_unit(BITS)
    if CENTER:
        least, other = half_pairs(
            evens * inverse * (-CENTER * UNIT), odds * inverse * (-CENTER * UNIT)
        )
        if not COMPILED:
            least += other
        sums = tl.broadcast_to(least[None, :], (ROWS, WORDS))
    else:
        sums = tl.zeros((ROWS, WORDS), tl.int32 if COMPILED else tl.float32)
    up_sums = sums
    for field in tl.static_range(FROM, FROM + SHARED):
        even = _inputs(x_ptr, start, field, 0, WIDTH, PAIRS, BITS, MASKED)
        odd = _inputs(x_ptr, start, field, 1, WIDTH, PAIRS, BITS, MASKED)
        factor = inverse * half_factor(field, BITS)
        pair, other = half_pairs(even * factor, odd * factor)
        pair, other = pair[None, :], other[None, :]
        sums = add_half_products(sums, words, pair, other, field, BITS)
        if SILU:
            up_sums = add_half_products(up_sums, up_words, pair, other, field, BITS)
    powers = powers[None, :] * (1.0 / UNIT)
    part = half_sums(sums, REDUCE) * powers
    up_part = half_sums(up_sums, REDUCE) * powers if SILU else part
    return part, up_part, _parts(evens + odds, REDUCE)


@triton.jit
def _products(
    x_ptr, start, words, up_words, tables, up_tables,
    FROM: tl.constexpr, SHARED: tl.constexpr, WIDTH: tl.constexpr, PAIRS: tl.constexpr,
    BITS: tl.constexpr, REDUCE: tl.constexpr, MASKED: tl.constexpr, ZERO: tl.constexpr,
    TABLE: tl.constexpr, SUMMED: tl.constexpr, SILU: tl.constexpr,
):  # fmt: skip
    """As ``_half_products``, in FP32, with numbers from tables or codes less ZERO. words: what
    ``load_chunks`` gives. SUMMED: sums of the inputs are wanted."""
    ROWS: tl.constexpr = words[0].shape[0]
    WORDS: tl.constexpr = words[0].shape[1]
    HALVES: tl.constexpr = 1 if BITS == 0 else 2
    OFFSET: tl.constexpr = BITS > 0 and TABLE == 0
    sums = tl.zeros((WORDS,), tl.float32)
    of_inputs = tl.zeros((WORDS,), tl.float32)
    if OFFSET or SUMMED:
        for field in tl.static_range(FROM, FROM + SHARED):
            for half in tl.static_range(HALVES):
                x = _inputs(x_ptr, start, field, half, WIDTH, PAIRS, BITS, MASKED)
                sums -= x * (offset(field, half, BITS) + ZERO)
                of_inputs += x
    products = tl.broadcast_to(sums[None, :], (ROWS, WORDS))
    up_products = products
    for field in tl.static_range(FROM, FROM + SHARED):
        for half in tl.static_range(HALVES):
            x = _inputs(x_ptr, start, field, half, WIDTH, PAIRS, BITS, MASKED)[None, :]
            first, second, high = words
            products += numbers(first, second, high, tables, field, half, BITS, TABLE) * x
            if SILU:
                first, second, high = up_words
                found = numbers(first, second, high, up_tables, field, half, BITS, TABLE)
                up_products += found * x
    part = _parts(products, REDUCE)
    up_part = _parts(up_products, REDUCE) if SILU else part
    return part, up_part, _parts(of_inputs, REDUCE)


@triton.jit
def _add_words(
    acc, up_acc, x_ptr, w_ptr, scales_ptr, shifts_ptr, tables, up_tables, rows, up_rows,
    STEP: tl.constexpr, PAIRS: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr,
    BITS: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, ROW_BLOCK: tl.constexpr,
    ZERO: tl.constexpr, SHIFT: tl.constexpr, TABLE: tl.constexpr, SCALED: tl.constexpr,
    BLOCK_W: tl.constexpr, REDUCE: tl.constexpr, SILU: tl.constexpr, HALF: tl.constexpr,
    WAIT: tl.constexpr,
):  # fmt: skip
    """The products of the STEP-th BLOCK_W words of each row, added to acc, and of up_rows where
    SILU. WAIT: for x. Words and scales are requested before: the compiler leaves them there."""
    FIELDS: tl.constexpr = fields_of(BITS)
    PARTS: tl.constexpr = words_of(BITS)
    HALVES: tl.constexpr = 1 if BITS == 0 else 2
    SHARED: tl.constexpr = shared_fields(BITS, WIDTH * HALVES, GROUP)
    RAGGED: tl.constexpr = (STEP + 1) * BLOCK_W > COLUMNS
    MASKED: tl.constexpr = RAGGED or COLUMNS * FIELDS > PAIRS
    CENTER: tl.constexpr = (1 << (BITS - 1)) if SHIFT == 1 else ZERO
    TAKEN: tl.constexpr = CENTER if HALF else 0
    columns = STEP * BLOCK_W + tl.arange(0, BLOCK_W)
    at = columns if PARTS == 1 else columns // WIDTH * (PARTS * WIDTH) + columns % WIDTH
    present = (columns < COLUMNS)[None, :]
    tiles = w_ptr + rows[:, None].to(tl.int64) * (COLUMNS * PARTS) + at[None, :]
    words = load_chunks(tiles, present, BITS, WIDTH, RAGGED)
    up_words = words
    if SILU:
        tiles = w_ptr + up_rows[:, None].to(tl.int64) * (COLUMNS * PARTS) + at[None, :]
        up_words = load_chunks(tiles, present, BITS, WIDTH, RAGGED)
    groups = STEP * BLOCK_W + tl.arange(0, BLOCK_W // REDUCE) * REDUCE
    groups = groups // WIDTH * (FIELDS * WIDTH)
    scales, up_scales = (), ()
    for shared in tl.static_range(0, FIELDS, SHARED):
        if GROUP > 0:
            group = tl.minimum((groups + shared * WIDTH) * HALVES // GROUP, GROUPS - 1)[:, None]
        else:
            group = groups[:, None] * 0
        places = (rows // ROW_BLOCK * GROUPS)[None, :] + group
        scales = scales + _load_scales(places, scales_ptr, shifts_ptr, SCALED, SHIFT)
        if SILU:
            places = (up_rows // ROW_BLOCK * GROUPS)[None, :] + group
            up_scales = up_scales + _load_scales(places, scales_ptr, shifts_ptr, SCALED, SHIFT)
    if WAIT:
        gdc_wait()
    start = columns // WIDTH * (FIELDS * WIDTH) + columns % WIDTH
    if HALF:
        powers, inverse = _powers(x_ptr, start, FIELDS, WIDTH, PAIRS, BITS, REDUCE, MASKED)
    for shared in tl.static_range(0, FIELDS, SHARED):
        if HALF:
            part, up_part, of_inputs = _half_products(
                x_ptr, start, powers, inverse, words[0], up_words[0],
                shared, SHARED, WIDTH, PAIRS, BITS, REDUCE, MASKED, CENTER, SILU,
            )  # fmt: skip
        else:
            part, up_part, of_inputs = _products(
                x_ptr, start, words, up_words, tables, up_tables, shared, SHARED, WIDTH, PAIRS,
                BITS, REDUCE, MASKED, ZERO, TABLE, SHIFT != 0, SILU,
            )  # fmt: skip
        acc = _add_scaled(acc, part, of_inputs, scales, shared // SHARED, SCALED, SHIFT, TAKEN)
        if SILU:
            up_acc = _add_scaled(
                up_acc, up_part, of_inputs, up_scales, shared // SHARED, SCALED, SHIFT, TAKEN
            )
    return acc, up_acc


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
    SCALED: tl.constexpr = SCALE and GROUP > 0  # else in the end
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = rows < n
    rows = tl.minimum(rows, n - 1)  # so that loads need no mask
    up_rows = rows + n
    tables = table_ptr + (rows * (1 << BITS))[:, None] if TABLE == 2 else table_ptr
    up_tables = table_ptr + (up_rows * (1 << BITS))[:, None] if TABLE == 2 else table_ptr
    acc = tl.zeros((BLOCK_N, BLOCK_W // REDUCE), tl.float32)
    up_acc = tl.zeros((BLOCK_N, BLOCK_W // REDUCE), tl.float32)
    STEPS: tl.constexpr = (COLUMNS + BLOCK_W - 1) // BLOCK_W
    for step in tl.static_range(STEPS):
        acc, up_acc = _add_words(
            acc, up_acc, x_ptr, w_ptr, scales_ptr, shifts_ptr, tables, up_tables, rows, up_rows,
            step, PAIRS, COLUMNS, WIDTH, BITS, GROUP, GROUPS, ROW_BLOCK, ZERO, SHIFT, TABLE, SCALED,
            BLOCK_W, REDUCE, SILU, HALF, step == 0 and PDL != 0,
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
