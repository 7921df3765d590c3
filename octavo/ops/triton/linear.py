"""Linears on a GPU: a GEMV for one row, tensor-core products for 2 to 64, cuBLAS beyond.

``plans.choose`` says which kernel takes a shape at each bucket of rows, once, when the linear is
made. The epilogue is inside the own kernels; after cuBLAS only SiLU·mul needs a kernel more.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from octavo.ops.linear import Epilogue
from octavo.ops.registry import register
from octavo.ops.triton.gemv import gemv
from octavo.ops.triton.launch import EARLY, OFF, available, has_wgmma, options, pdl_for
from octavo.ops.triton.plans import BUCKETS, CUBLAS, Plan, Shape, bucket_of, choose
from octavo.ops.triton.skinny import skinny, tiles

SILU_BLOCK = 1024


@triton.jit
def silu_mul_kernel(x_ptr, y_ptr, size, BLOCK: tl.constexpr, PDL: tl.constexpr):
    if PDL != 0:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < size
    gate = tl.load(x_ptr + row * 2 * size + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * 2 * size + size + columns, mask=inside, other=0.0).to(tl.float32)
    y = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(y_ptr + row * size + columns, y.to(y_ptr.dtype.element_ty), mask=inside)


def silu_mul(x: Tensor) -> Tensor:
    """[T, 2m] -> [T, m]: silu(first half) * second half, rounded once."""
    rows, size = len(x), x.shape[1] // 2
    y = x.new_empty(rows, size)
    if rows:
        pdl = EARLY if pdl_for(rows) else OFF
        grid = (rows, triton.cdiv(size, SILU_BLOCK))
        silu_mul_kernel[grid](x, y, size, BLOCK=SILU_BLOCK, PDL=pdl, **options(4, pdl))
    return y


@register("linear", "triton", available)
class TritonLinear:
    """``plans``: the kernel for each bucket of rows."""

    def __init__(self, weights: Sequence[Tensor], bias: Tensor | None, epilogue: Epilogue) -> None:
        """A single contiguous weight is used as it is, several are copied into one."""
        self.weight = (weights[0] if len(weights) == 1 else torch.cat(tuple(weights))).contiguous()
        self.bias = bias
        self.epilogue = epilogue
        n, k = self.weight.shape
        self.shape = Shape(n, k, epilogue)
        self.out_features = n // 2 if self.shape.silu else n
        self.use({bucket: choose(self.shape, bucket, has_wgmma()) for bucket in BUCKETS})

    def use(self, plans: dict[int, Plan]) -> None:
        """Takes other plans than the chosen ones (for tuning)."""
        self.plans = plans
        count = max(
            (
                tiles(plan, self.out_features, self.shape.silu)
                for plan in plans.values()
                if plan.split_k > 1
            ),
            default=0,
        )
        # What split sums count their parts with: zeros between calls, so made once.
        self._arrived = torch.zeros(count, dtype=torch.int32, device=self.weight.device)

    def __call__(self, x: Tensor, other: Tensor | None = None) -> Tensor:
        """x: [T, in]; other: [T, out], which ``add`` needs and may write its result over."""
        if (other is not None) != (self.epilogue == "add"):
            raise ValueError(f"epilogue {self.epilogue}: {'no' if other is None else 'an'} operand")
        rows = len(x)
        bucket = bucket_of(rows)
        plan = CUBLAS if bucket is None else self.plans[bucket]
        if bucket is None or plan.kind == "cublas":
            return self._cublas(x, other)
        x = x.contiguous()
        other = None if other is None else other.contiguous()
        dtype = torch.float32 if self.epilogue == "logits" else x.dtype
        y = torch.empty(rows, self.out_features, dtype=dtype, device=x.device)
        silu, pdl = self.shape.silu, pdl_for(rows)
        if plan.kind == "gemv":
            gemv(plan, x, self.weight, self.bias, other, y, silu, pdl)
        else:
            arguments = (x, self.weight, self.bias, other, y, self._arrived, silu, pdl)
            skinny(plan, bucket, *arguments)
        return y

    def _cublas(self, x: Tensor, other: Tensor | None) -> Tensor:
        if self.epilogue == "logits":
            y = product_in_fp32(x, self.weight)
            return y if self.bias is None else y.add_(self.bias)
        if other is not None and self.bias is None:
            return other.addmm_(x, self.weight.t())  # in place: one pass over ``other``, not three
        y = F.linear(x, self.weight, self.bias)
        if other is not None:
            return y.add_(other)
        return silu_mul(y) if self.shape.silu else y


def product_in_fp32(x: Tensor, weight: Tensor) -> Tensor:
    """x @ weight.T of 16-bit numbers, not rounded back to them."""
    if x.is_cuda:
        return torch.mm(x, weight.t(), out_dtype=torch.float32)
    return x.float() @ weight.float().t()  # interpreted: ATen has it on CUDA alone
