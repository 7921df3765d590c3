"""Linears on quantized weights on a GPU, inputs as they are.

Weights are packed once, on the device (``packed.py``). One row is a GEMV, up to a few hundred go
to the tensor cores, for more the weight is expanded and cuBLAS multiplies. Weights that no one kind
can hold are multiplied one after the other, and their epilogue follows.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.ops.linear import Apply, Epilogue
from octavo.ops.registry import register
from octavo.ops.triton.expand import expand, reserve, rows_at_a_time, scratch
from octavo.ops.triton.launch import available, has_wgmma, pdl_for
from octavo.ops.triton.linear import TritonLinear, product_in_fp32, silu_mul
from octavo.ops.triton.packed import Packed, pack, together
from octavo.ops.triton.packed_gemv import packed_gemv
from octavo.ops.triton.packed_inputs import gathered, outlier_products
from octavo.ops.triton.packed_plans import (
    BUCKETS,
    EXPAND,
    PackedPlan,
    bucket_of,
    choose,
    rows_of_tile,
)
from octavo.ops.triton.packed_skinny import packed_skinny, tiles
from octavo.ops.weights import Weight


class PackedLinear:
    """Of one packed weight. ``plans``: the kernel for each bucket of rows."""

    def __init__(
        self,
        packed: Packed,
        bias: Tensor | None,
        epilogue: Epilogue,
        dtype: torch.dtype,
        expands: bool = True,
    ) -> None:
        """``expands``: there may be more rows than own products take."""
        self.packed, self.bias, self.epilogue, self.dtype = packed, bias, epilogue, dtype
        self.silu = epilogue == "silu_mul"
        self.out_features = packed.rows // (2 if self.silu else 1)
        self.rows_of_tile = rows_of_tile(packed.layout)
        if expands:
            reserve(packed, dtype)
        self._places: Tensor | None = None  # of each input in the packed weight
        if packed.gather is not None:
            present = (packed.gather >= 0).nonzero()[:, 0]
            self._places = torch.empty_like(present)
            self._places[packed.gather[present].long()] = present
        layout, rows = packed.layout, packed.rows
        self.use({b: choose(layout, rows, epilogue, b, has_wgmma()) for b in BUCKETS})

    def use(self, plans: dict[int, PackedPlan]) -> None:
        """Takes other plans than the chosen ones (for tuning)."""
        self.plans = plans
        counts = [
            tiles(plan, self.out_features, self.silu) * -(-bucket // self.rows_of_tile)
            for bucket, plan in plans.items()
            if plan.split_k > 1
        ]
        # What split sums count their parts with: zeros between calls, so made once.
        device = self.packed.words.device
        self._arrived = torch.zeros(max(counts, default=0), dtype=torch.int32, device=device)

    def __call__(self, x: Tensor, other: Tensor | None = None) -> Tensor:
        """x: [T, in]; other: [T, out], which ``add`` needs and may write its result over."""
        if (other is not None) != (self.epilogue == "add"):
            raise ValueError(f"epilogue {self.epilogue}: {'no' if other is None else 'an'} operand")
        rows, pdl = len(x), pdl_for(len(x))
        dtype = torch.float32 if self.epilogue == "logits" else self.dtype
        if not rows:
            return torch.empty(0, self.out_features, dtype=dtype, device=x.device)
        x = gathered(self.packed, x, pdl)
        bucket = bucket_of(rows)
        plan = EXPAND if bucket is None else self.plans[bucket]
        if plan.kind == "expand":
            return self._expanded(x, other)
        y = torch.empty(rows, self.out_features, dtype=dtype, device=x.device)
        other = None if other is None else other.contiguous()
        extra = outlier_products(self.packed, x, pdl)
        if plan.kind == "gemv":
            packed_gemv(plan, x, self.packed, self.bias, other, extra, y, self.silu, pdl)
        else:
            assert bucket is not None
            operands = (self.packed, self.bias, other, extra, y, self._arrived, self.silu, pdl)
            packed_skinny(plan, max(16, min(bucket, self.rows_of_tile)), x, *operands)
        return y

    def _expanded(self, x: Tensor, other: Tensor | None) -> Tensor:
        packed, count = self.packed, rows_at_a_time(self.packed)
        dtype = torch.float32 if self.epilogue == "logits" else self.dtype
        y = torch.empty(len(x), packed.rows, dtype=dtype, device=x.device)
        for first in range(0, packed.rows, count):
            part = y[:, first : first + count]
            weight = scratch(packed, self.dtype, part.shape[1])
            expand(packed, weight, first)
            if self.epilogue == "logits":
                part.copy_(product_in_fp32(x, weight))
            else:
                torch.mm(x, weight.t(), out=part)
        return self.finished(y, other)

    def finished(self, y: Tensor, other: Tensor | None) -> Tensor:
        """The epilogue, after a product."""
        if self.bias is not None:
            y += self.bias
        if other is not None:
            return y.add_(other)
        return silu_mul(y) if self.silu else y

    def rows(self, ids: Tensor) -> Tensor:
        """ids: int64 [r]. Rows of the weight, [r, in]."""
        packed = self.packed
        shape = (len(ids), packed.layout.inputs)
        found = torch.empty(shape, dtype=self.dtype, device=ids.device)
        expand(packed, found, ids=ids)
        return found if self._places is None else found[:, self._places]


def split(tensor: Tensor | None, sizes: Sequence[int]) -> Sequence[Tensor | None]:
    return [None] * len(sizes) if tensor is None else tensor.split(list(sizes))


@register("weight_only_linear", "triton", available)
class TritonWeightOnlyLinear:
    def __init__(
        self, weights: Sequence[Weight], bias: Tensor | None, epilogue: Epilogue, dtype: torch.dtype
    ) -> None:
        """As the definition (ops/weight_only.py)."""
        self.epilogue, self.dtype = epilogue, dtype
        kinds = together(weights)
        inside: Epilogue = "none"  # what parts may do by themselves
        if len(kinds) == 1 or epilogue == "logits":
            inside = epilogue
        biases = split(bias, [weight.shape[0] for weight in kinds])
        self.parts: list[Apply] = []
        for weight, part in zip(kinds, biases):
            if isinstance(weight, Tensor):
                self.parts.append(TritonLinear([weight], part, inside))
            else:
                self.parts.append(PackedLinear(pack(weight), part, inside, dtype))

    def __call__(self, x: Tensor, other: Tensor | None = None) -> Tensor:
        """As ``linear`` (ops/linear.py)."""
        if len(self.parts) == 1:
            return self.parts[0](x, other)
        y = torch.cat([part(x) for part in self.parts], dim=1)
        if other is not None:
            return y.add_(other)
        return silu_mul(y) if self.epilogue == "silu_mul" else y

    def rows(self, ids: Tensor) -> Tensor:
        """ids: int64 [r]. Rows of the weight, [r, in], in the linear's dtype; of one weight."""
        (part,) = self.parts
        if isinstance(part, PackedLinear):
            return part.rows(ids)
        assert isinstance(part, TritonLinear)
        return F.embedding(ids, part.weight)
