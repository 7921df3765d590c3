"""Linears on INT8 weights and inputs rounded to INT8 on a GPU: one scale an output and one a token.

Sums are whole numbers, exact. Few rows go to own tensor-core products, more to cuBLAS.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.ops.joined import alike
from octavo.ops.linear import Epilogue
from octavo.ops.registry import register
from octavo.ops.triton import launch
from octavo.ops.triton.expand import expand
from octavo.ops.triton.packed import Layout, Packed
from octavo.ops.triton.packed_inputs import gathered
from octavo.ops.triton.packed_plans import PackedPlan, rounded_plan, tile_of
from octavo.ops.triton.packed_skinny import packed_skinny, tiles
from octavo.ops.triton.rounding import rounded
from octavo.ops.weights import ZERO, QuantizedWeight

OWN = 64  # rows of own products
BLOCK = 1024


@triton.jit
def finish_kernel(
    sums_ptr, scales_ptr, x_scales_ptr, bias_ptr, other_ptr, y_ptr, n,
    BLOCK: tl.constexpr, BIAS: tl.constexpr, ADD: tl.constexpr, SILU: tl.constexpr,
):  # fmt: skip
    """y[row, n] from int32 sums [row, n], or [row, 2n] with SILU."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < n
    x_scale = tl.load(x_scales_ptr + row)
    sums = sums_ptr + row * (2 * n if SILU else n) + columns
    y = tl.load(sums, mask=inside, other=0).to(tl.float32) * x_scale
    y *= tl.load(scales_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    if BIAS:
        y += tl.load(bias_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    if SILU:
        up = tl.load(sums + n, mask=inside, other=0).to(tl.float32) * x_scale
        up *= tl.load(scales_ptr + n + columns, mask=inside, other=0.0).to(tl.float32)
        if BIAS:
            up += tl.load(bias_ptr + n + columns, mask=inside, other=0.0).to(tl.float32)
        y = y / (1.0 + tl.exp(-y)) * up
    if ADD:
        y += tl.load(other_ptr + row * n + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(y_ptr + row * n + columns, y.to(y_ptr.dtype.element_ty), mask=inside)


def whole_weights(weights: Sequence[QuantizedWeight]) -> QuantizedWeight:
    """One weight of 8 bits around ``ZERO``. Raises ValueError for what the kernels do not have."""
    found = alike(weights)
    first = found[0]
    inputs = first.shape[1]
    if first.group < inputs or first.minimums is not None or first.zeros is not None:
        raise ValueError(
            f"INT8 products on a GPU have one scale for all {inputs} inputs of an output, without "
            f"zeros and minimums, not groups of {first.group}"
        )
    if first.bits != 8 or first.zero != ZERO:
        raise ValueError(f"INT8 products on a GPU need codes of 8 bits around {ZERO}")
    codes, scales = (torch.cat([getattr(w, name) for w in found]) for name in ("codes", "scales"))
    return QuantizedWeight(codes, scales, None, 8, first.group, ZERO, None, first.order)


@register("quantized_linear", "triton", launch.available)
class TritonInt8Linear:
    def __init__(
        self,
        weights: Sequence[QuantizedWeight],
        bias: Tensor | None,
        epilogue: Epilogue,
        dtype: torch.dtype,
    ) -> None:
        """As the definition (ops/quantized.py). Raises ValueError for weights with groups."""
        weight = whole_weights(weights)
        outputs, inputs = weight.shape
        padded = -(-inputs // 16) * 16
        values = torch.zeros(outputs, padded, dtype=torch.int8, device=weight.codes.device)
        values[:, :inputs] = weight.codes.view(torch.int8) ^ -128
        gather = weight.order
        if gather is None and padded > inputs:
            gather = torch.arange(inputs, device=values.device)
        if gather is not None:
            gather = torch.nn.functional.pad(gather, (0, padded - inputs), value=-1).int()
        layout = Layout(0, padded, 128)
        scales = weight.scales.float().contiguous()
        self.packed = Packed(layout, values, scales, None, None, gather, None)
        self.inputs, self.order = inputs, weight.order
        self.bias, self.epilogue, self.dtype = bias, epilogue, dtype
        self.silu = epilogue == "silu_mul"
        self.out_features = outputs // (2 if self.silu else 1)
        counts = [tiles(self._plan(rows), self.out_features, self.silu) for rows in (16, 32, 64)]
        self._arrived = torch.zeros(max(counts), dtype=torch.int32, device=values.device)

    def _plan(self, rows: int) -> PackedPlan:
        layout, count = self.packed.layout, self.packed.rows
        return rounded_plan(layout, count, self.epilogue, rows, launch.has_wgmma())

    def __call__(self, x: Tensor, other: Tensor | None = None) -> Tensor:
        if (other is not None) != (self.epilogue == "add"):
            raise ValueError(f"epilogue {self.epilogue}: {'no' if other is None else 'an'} operand")
        rows, pdl = len(x), launch.pdl_for(len(x))
        dtype = torch.float32 if self.epilogue == "logits" else self.dtype
        y = torch.empty(rows, self.out_features, dtype=dtype, device=x.device)
        if not rows:
            return y
        values, scales = rounded(gathered(self.packed, x, pdl), torch.int8, pdl)
        other = None if other is None else other.contiguous()
        if rows <= OWN or self.packed.rows % 8:
            operands = (self.packed, self.bias, other, None, y, self._arrived, self.silu, pdl)
            packed_skinny(self._plan(rows), tile_of(rows), values, *operands, scales)
            return y
        sums = torch._int_mm(values, self.packed.words.t())
        finish_kernel[(rows, triton.cdiv(self.out_features, BLOCK))](
            sums, self.packed.scales, scales, sums if self.bias is None else self.bias,
            sums if other is None else other, y, self.out_features, BLOCK=BLOCK,
            BIAS=self.bias is not None, ADD=other is not None, SILU=self.silu,
            **launch.options(4),
        )  # fmt: skip
        return y

    def rows(self, ids: Tensor) -> Tensor:
        """ids: int64 [r]. Rows of the weight, [r, in], in the linear's dtype."""
        shape = (len(ids), self.packed.layout.inputs)
        found = torch.empty(shape, dtype=self.dtype, device=ids.device)
        expand(self.packed, found, ids=ids)
        found = found[:, : self.inputs]
        return found if self.order is None else found[:, self.order.argsort()]
