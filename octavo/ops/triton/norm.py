"""RMS norm, one program per row: 1.1 us of a decode step on an H200 when chained with PDL."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from octavo.ops.registry import register
from octavo.ops.triton.launch import EARLY, OFF, available, next_power_of_2, options, pdl_for

MAX_SIZE = 16384


@triton.jit
def rms_norm_kernel(
    x_ptr, weight_ptr, y_ptr, eps, SIZE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    if PDL != 0:
        gdc_launch_dependents()
    columns = tl.arange(0, BLOCK)
    inside = columns < SIZE
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0)
    if PDL != 0:
        gdc_wait()
    start = tl.program_id(0).to(tl.int64) * SIZE
    x = tl.load(x_ptr + start + columns, mask=inside, other=0.0)
    wide = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / SIZE + eps)
    normed = (wide * scale).to(x.dtype)  # rounded, as the definition does
    y = normed.to(tl.float32) * weight.to(tl.float32)
    tl.store(y_ptr + start + columns, y.to(x.dtype), mask=inside)


@register("rms_norm", "triton", available, batch_invariant="yes")
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x: [..., H], H up to 16,384; weight: [H]. Raises ValueError for longer rows."""
    size = x.shape[-1]
    if size > MAX_SIZE:
        raise ValueError(f"rms_norm over {size} elements: the Triton version takes {MAX_SIZE}")
    x = x.contiguous()
    y = torch.empty_like(x)
    rows = x.numel() // size
    if rows:
        # The kernel's own work is short, so its successor may always start at once.
        pdl = EARLY if pdl_for(rows) else OFF
        warps = 4 if size <= 2048 else 8 if size <= 8192 else 16
        rms_norm_kernel[(rows,)](
            x, weight, y, eps, SIZE=size, BLOCK=next_power_of_2(size), PDL=pdl,
            **options(warps, pdl),
        )  # fmt: skip
    return y
