"""Inputs rounded to 8 bits in one kernel, as ops/float8.py and ops/quantized.py define it.

Each row, or each group of a row's inputs, is divided by a scale of its own, FP8 also by a given
one. Where the inputs are SiLU·mul of what another linear gave, that is computed on the way: they
are never written.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from octavo.ops.float8 import E4M3, LARGEST, LEAST_SCALE
from octavo.ops.quantized import LEVELS
from octavo.ops.triton.launch import next_power_of_2, options

GROUPS_AT_A_TIME = 2048  # inputs of a program, of groups
_LARGEST, _LEAST = tl.constexpr(LARGEST), tl.constexpr(LEAST_SCALE)
_LEVELS = tl.constexpr(float(LEVELS))
_TO_WHOLE = tl.constexpr(float(3 << 22))  # FP32 has no fractions there: ties go to even


@triton.jit
def round_kernel(
    x_ptr, scale_ptr, y_ptr, scales_ptr, size, row_stride, group_stride,
    GROUP: tl.constexpr, BLOCK: tl.constexpr, WHOLE: tl.constexpr, GIVEN: tl.constexpr,
    SILU: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """BLOCK inputs of a row, GROUP of which share a scale. WHOLE: to int8. GIVEN: by scale_ptr.
    SILU: x has rows of 2 ``size``, gates and what they are multiplied with."""
    if PDL != 0:
        gdc_launch_dependents()
        gdc_wait()
    COUNT: tl.constexpr = BLOCK // GROUP
    row = tl.program_id(0).to(tl.int64)
    groups = tl.program_id(1) * COUNT + tl.arange(0, COUNT)
    columns = groups[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    inside = columns < size
    if SILU:
        x_ptr += row * 2 * size
        gate = tl.load(x_ptr + columns, mask=inside, other=0.0).to(tl.float32)
        x = gate / (1.0 + tl.exp(-gate))
        x *= tl.load(x_ptr + size + columns, mask=inside, other=0.0).to(tl.float32)
        x = x.to(x_ptr.dtype.element_ty).to(tl.float32)  # as if they had been written
    else:
        x = tl.load(x_ptr + row * size + columns, mask=inside, other=0.0).to(tl.float32)
    largest = tl.max(tl.abs(x), 1)
    if WHOLE:
        inverse = tl.div_rn(_LEVELS + largest * 0.0, largest)
        inverse = tl.where(inverse < float("inf"), inverse, 0.0)
        y = (x * inverse[:, None] + _TO_WHOLE) - _TO_WHOLE
        scales = tl.div_rn(largest, _LEVELS + largest * 0.0)
    else:
        if GIVEN:
            scales = tl.load(scale_ptr).to(tl.float32) + largest * 0.0
        else:
            scales = tl.maximum(tl.div_rn(largest, _LARGEST + largest * 0.0), _LEAST)
        y = x * tl.div_rn(1.0 + scales * 0.0, scales)[:, None]
        y = tl.minimum(tl.maximum(y, -_LARGEST), _LARGEST)
    tl.store(y_ptr + row * size + columns, y.to(y_ptr.dtype.element_ty), mask=inside)
    places = row * row_stride + groups * group_stride
    tl.store(scales_ptr + places, scales, mask=groups * GROUP < size)


def rounded(
    x: Tensor, dtype: torch.dtype, pdl: int, group: int = 0, scale: Tensor | None = None,
    by_group: bool = False, silu: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """x: [T, in]. What is multiplied in its place, E4M3 or int8 (``dtype``), and its scales, FP32
    [T, groups]. group: inputs that share a scale, a power of two, 0 for all. scale: FP32 [], for
    all of E4M3. by_group: scales of a group lie together. silu: x is [T, 2 in], and what is rounded
    SiLU(first half) * second half, in x's dtype."""
    rows, size = x.shape
    size = size // 2 if silu else size
    y = torch.empty(rows, size, dtype=dtype, device=x.device)
    span = group or next_power_of_2(size)
    block = max(span, GROUPS_AT_A_TIME) if group else span
    groups = triton.cdiv(size, group) if group else 1
    shape = (groups, rows) if by_group else (rows, groups)
    scales = torch.empty(shape, dtype=torch.float32, device=x.device)
    scales = scales.t() if by_group else scales
    round_kernel[(rows, triton.cdiv(size, block))](
        x, x if scale is None else scale, y, scales, size, *scales.stride(), GROUP=span,
        BLOCK=block, WHOLE=dtype != E4M3, GIVEN=scale is not None, SILU=silu,
        PDL=pdl, **options(min(16, max(4, block // 1024)), pdl),
    )  # fmt: skip
    return y, scales
