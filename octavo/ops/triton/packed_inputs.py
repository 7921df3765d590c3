"""What a product with packed weights needs beside the weights: inputs in their order, outliers."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from octavo.ops.triton.launch import options
from octavo.ops.triton.packed import Packed

BLOCK = 1024
OUTLIERS = 32  # of a row at a time
ROWS = 8  # of the weight in a program


@triton.jit
def gather_kernel(
    x_ptr, places_ptr, y_ptr, inputs, size, BLOCK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    if PDL != 0:
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < size
    places = tl.load(places_ptr + columns, mask=inside, other=-1)
    if PDL != 0:
        gdc_wait()
    x = tl.load(x_ptr + row * inputs + places, mask=places >= 0, other=0.0)
    tl.store(y_ptr + row * size + columns, x, mask=inside)


def gathered(packed: Packed, x: Tensor, pdl: int) -> Tensor:
    """x: [T, in of the weight]. [T, layout.inputs], in the order of the packed weight."""
    x = x.contiguous()
    if packed.gather is None:
        return x
    size = len(packed.gather)
    y = torch.empty(len(x), size, dtype=x.dtype, device=x.device)
    gather_kernel[(len(x), triton.cdiv(size, BLOCK))](
        x, packed.gather, y, x.shape[1], size, BLOCK=BLOCK, PDL=pdl, **options(4, pdl)
    )
    return y


@triton.jit
def outliers_kernel(
    x_ptr, starts_ptr, columns_ptr, values_ptr, y_ptr, n,
    INPUTS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """y[row of x, n]: the outliers of ROWS rows of the weight times a row of x."""
    if PDL != 0:
        gdc_launch_dependents()
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = rows < n
    starts = tl.load(starts_ptr + rows, mask=inside, other=0)
    ends = tl.load(starts_ptr + rows + 1, mask=inside, other=0)
    if PDL != 0:
        gdc_wait()
    x_row = x_ptr + tl.program_id(1).to(tl.int64) * INPUTS
    y = tl.zeros((ROWS, BLOCK), tl.float32)
    for begin in range(0, tl.max(ends - starts, 0), BLOCK):
        at = starts[:, None] + begin + tl.arange(0, BLOCK)[None, :]
        present = at < ends[:, None]
        columns = tl.load(columns_ptr + at, mask=present, other=0)
        values = tl.load(values_ptr + at, mask=present, other=0.0)
        y += values * tl.load(x_row + columns, mask=present, other=0.0).to(tl.float32)
    y_row = y_ptr + tl.program_id(1).to(tl.int64) * n
    tl.store(y_row + rows, tl.sum(y, 1), mask=inside)


def outlier_products(packed: Packed, x: Tensor, pdl: int) -> Tensor | None:
    """x: [T, inputs]. FP32 [T, out], or None without outliers."""
    found = packed.outliers
    if found is None or not len(found.values):
        return None
    y = torch.empty(len(x), packed.rows, dtype=torch.float32, device=x.device)
    outliers_kernel[(triton.cdiv(packed.rows, ROWS), len(x))](
        x, found.starts, found.columns, found.values, y, packed.rows,
        INPUTS=x.shape[1], ROWS=ROWS, BLOCK=OUTLIERS, PDL=pdl, **options(2, pdl),
    )  # fmt: skip
    return y
