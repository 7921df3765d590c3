"""Packed weights as plain 16-bit numbers: some outputs at a time, in memory that linears share.

From a few hundred rows on, products cost more than weights, and cuBLAS multiplies numbers best.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.ops.triton.decode import (
    fields_of,
    load_chunks,
    numbers,
    offset,
    words_of,
)
from octavo.ops.triton.launch import options
from octavo.ops.triton.packed import Packed
from octavo.ops.triton.packed_gemv import constants, operands

AT_A_TIME = 1 << 27  # numbers: all of most linears, 256 MiB
TILE = 256  # outputs at a time are a multiple of these: cuBLAS halves its speed on ragged ones
BLOCK_N = 32
_scratch: dict[tuple[torch.device, torch.dtype], Tensor] = {}


@triton.jit(do_not_specialize=["first", "count"])
def expand_kernel(
    w_ptr, scales_ptr, shifts_ptr, table_ptr, ids_ptr, y_ptr, first, count,
    INPUTS: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr, BITS: tl.constexpr,
    GROUP: tl.constexpr, GROUPS: tl.constexpr, ROW_BLOCK: tl.constexpr, ZERO: tl.constexpr,
    SHIFT: tl.constexpr, TABLE: tl.constexpr, SCALE: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_W: tl.constexpr, CHOSEN: tl.constexpr,
):  # fmt: skip
    """y[count, INPUTS]: the weight's rows from ``first`` on, or those of ids where CHOSEN."""
    FIELDS: tl.constexpr = fields_of(BITS)
    PARTS: tl.constexpr = words_of(BITS)
    places = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    stored = (places < count)[:, None]
    rows = tl.minimum(places, count - 1)
    if CHOSEN:
        rows = tl.load(ids_ptr + rows)
    else:
        rows += first
    columns = tl.program_id(1) * BLOCK_W + tl.arange(0, BLOCK_W)
    at = columns if PARTS == 1 else columns // WIDTH * (PARTS * WIDTH) + columns % WIDTH
    tiles = w_ptr + rows[:, None].to(tl.int64) * (COLUMNS * PARTS) + at[None, :]
    present = (columns < COLUMNS)[None, :]
    first_words, second, high = load_chunks(tiles, present, BITS, WIDTH, COLUMNS % BLOCK_W != 0)
    if BITS > 0:
        first_words, second = first_words.to(tl.int32), second.to(tl.int32)
        high = high.to(tl.int32)
    table_rows = table_ptr + (rows * (1 << BITS))[:, None] if TABLE == 2 else table_ptr
    start = columns // WIDTH * (FIELDS * WIDTH) + columns % WIDTH
    scaled_rows = rows // ROW_BLOCK * GROUPS
    for field in tl.static_range(FIELDS):
        w = numbers(first_words, second, high, table_rows, field, 0, BITS, TABLE)
        if GROUP > 0:
            group = (tl.program_id(1) * (BLOCK_W * FIELDS) + field * WIDTH) // GROUP
            group = tl.minimum(group, GROUPS - 1)
        else:
            group = 0
        if SHIFT != 0:
            shift = tl.load(shifts_ptr + scaled_rows + group).to(tl.float32)[:, None]
        if SHIFT == 1:
            w -= shift
        if BITS > 0 and TABLE == 0:
            w -= offset(field, 0, BITS) + ZERO
        if SCALE:
            w *= tl.load(scales_ptr + scaled_rows + group).to(tl.float32)[:, None]
        if SHIFT == 2:
            w += shift
        inputs = (start + field * WIDTH)[None, :]
        y = y_ptr + places[:, None].to(tl.int64) * INPUTS + inputs
        tl.store(y, w.to(y_ptr.dtype.element_ty), mask=stored & (inputs < INPUTS))


@triton.jit(do_not_specialize=["first"])
def add_outliers_kernel(
    starts_ptr, columns_ptr, values_ptr, ids_ptr, y_ptr, first,
    INPUTS: tl.constexpr, BLOCK: tl.constexpr, CHOSEN: tl.constexpr,
):  # fmt: skip
    """y[place, column] + the outliers of a row, of which no two stand in one column."""
    place = tl.program_id(0).to(tl.int64)
    if CHOSEN:
        row = tl.load(ids_ptr + place)
    else:
        row = first + place
    end = tl.load(starts_ptr + row + 1)
    for start in range(tl.load(starts_ptr + row), end, BLOCK):
        at = start + tl.arange(0, BLOCK)
        y = y_ptr + place * INPUTS + tl.load(columns_ptr + at, mask=at < end, other=0)
        sums = tl.load(y, mask=at < end, other=0.0).to(tl.float32)
        sums += tl.load(values_ptr + at, mask=at < end, other=0.0)
        tl.store(y, sums.to(y_ptr.dtype.element_ty), mask=at < end)


def expand(packed: Packed, y: Tensor, first: int = 0, ids: Tensor | None = None) -> None:
    """y: [count, inputs], of any type of float: what rows ``first`` .. of the weight stand for, or
    those of ids, int64 [count], rounded once or twice."""
    count, layout = len(y), packed.layout
    if not count:
        return
    block_w = layout.width
    if layout.bits == 0 and layout.group == 0:
        block_w = 256
    known = constants(packed)
    grid = (triton.cdiv(count, BLOCK_N), triton.cdiv(known["COLUMNS"], block_w))
    of_ids = y if ids is None else ids
    expand_kernel[grid](
        packed.words, *operands(packed, y), of_ids, y, first, count, **known,
        BLOCK_N=BLOCK_N, BLOCK_W=block_w, CHOSEN=ids is not None, **options(4),
    )  # fmt: skip
    if packed.outliers is not None and len(packed.outliers.values):
        found = packed.outliers
        add_outliers_kernel[(count,)](
            found.starts, found.columns, found.values, of_ids, y, first,
            INPUTS=layout.inputs, BLOCK=64, CHOSEN=ids is not None, **options(1),
        )  # fmt: skip


def rows_at_a_time(packed: Packed) -> int:
    fitting = AT_A_TIME // packed.layout.inputs
    return min(packed.rows, max(TILE, fitting // TILE * TILE))


def reserve(packed: Packed, dtype: torch.dtype) -> None:
    """Makes the shared memory large enough for what is expanded of this weight at a time."""
    key = (packed.words.device, dtype)
    size = rows_at_a_time(packed) * packed.layout.inputs
    if key not in _scratch or _scratch[key].numel() < size:
        _scratch[key] = torch.empty(size, dtype=dtype, device=packed.words.device)


def reserved_bytes() -> int:
    """Of the memory that linears share."""
    return sum(memory.nbytes for memory in _scratch.values())


def scratch(packed: Packed, dtype: torch.dtype, rows: int) -> Tensor:
    """[rows, inputs] of the shared memory: until the next linear is called."""
    flat = _scratch[(packed.words.device, dtype)]
    return flat[: rows * packed.layout.inputs].view(rows, packed.layout.inputs)
