"""Linears on FP8 weights on a GPU, inputs rounded to FP8 where that is faster.

The input of one row stays as it is: a GEMV has no use for FP8. Else both are FP8: own tensor-core
products while they are few rows, cuBLAS beyond (``PLAIN``, ``OWN``, ``OWN_BLOCKS``). With 8 rows a
step of Llama-8B took 3.06 ms on an H200, and 3.18 with inputs as they were. Where weights have
scales of blocks, or before Hopper, that was not measured: they keep the inputs of up to 16 rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.ops.float8 import E4M3
from octavo.ops.linear import Epilogue
from octavo.ops.registry import register
from octavo.ops.triton import launch
from octavo.ops.triton.linear import silu_mul
from octavo.ops.triton.packed import pack, together
from octavo.ops.triton.packed_plans import PackedPlan, rounded_plan, tile_of
from octavo.ops.triton.packed_skinny import packed_skinny, tiles
from octavo.ops.triton.rounding import rounded
from octavo.ops.triton.weight_only import PackedLinear, split
from octavo.ops.weights import Float8Weight

PLAIN, PLAIN_BLOCKS = 1, 16  # rows whose inputs stay as they are
OWN = 128  # rows of own products of FP8; torch's rows by scales are up to 2x slower there,
OWN_NARROW = 256  # also beyond for few outputs
NARROW = 5120
OWN_BLOCKS = 512  # the same, of weights with scales of blocks
BLOCK = 128  # whose products cuBLAS has


def available(device: str, dtype: torch.dtype) -> bool:
    """From compute capability 8.9 on there are products of FP8."""
    if not launch.available(device, dtype):
        return False
    return launch.INTERPRETED or torch.cuda.get_device_capability() >= (8, 9)


class Float8Linear:
    """Of one weight. ``plan``: chooses that of the own products, for so many rows."""

    def __init__(
        self, weight: Float8Weight, bias: Tensor | None, epilogue: Epilogue, dtype: torch.dtype
    ) -> None:
        packed = pack(weight)
        layout = packed.layout
        self.packed, self.epilogue, self.dtype, self.bias = packed, epilogue, dtype, bias
        self.silu = epilogue == "silu_mul"
        self.out_features = packed.rows // (2 if self.silu else 1)
        self.input_scale = weight.input_scale
        # Rounding takes groups of a power of two.
        is_even = layout.group & (layout.group - 1) == 0
        self.is_rounded = packed.words.dtype == E4M3 and packed.gather is None and is_even
        self._own, self._multiply = self._ways(weight)
        self.takes_gates = self.is_rounded and self._multiply is not None
        self.plain = PackedLinear(packed, bias, epilogue, dtype, expands=not self.takes_gates)
        self.use(lambda rows: rounded_plan(layout, packed.rows, epilogue, rows, launch.has_wgmma()))

    def use(self, plan: Callable[[int], PackedPlan]) -> None:
        """Takes other plans of own products than the chosen ones (for tuning)."""
        self.plan = plan
        counts = [tiles(plan(rows), self.out_features, self.silu) for rows in (16, 32, 64)]
        device = self.packed.words.device
        self._arrived = torch.zeros(max(counts) * 8, dtype=torch.int32, device=device)

    def _ways(self, weight: Float8Weight) -> tuple[int, Callable[[Tensor], Tensor] | None]:
        """The rows of own products, and torch's product of more; None: it has none."""
        outputs, inputs = weight.shape
        fits = outputs % 16 == 0 and inputs % 16 == 0 and self.dtype == torch.bfloat16
        hopper = launch.has_wgmma() and not launch.INTERPRETED
        if weight.block[1] == 0 and fits:
            scales = weight.by_channel().scales
            self._scales = scales.view(1, -1)
            return (OWN_NARROW if outputs <= NARROW else OWN), self._by_rows
        if weight.block == (BLOCK, BLOCK) and fits and hopper and inputs % BLOCK == 0:
            columns = weight.scales.shape[1]
            self._scales = F.pad(weight.scales, (0, -columns % 4)).t()
            return OWN_BLOCKS, self._by_blocks
        return OWN, None

    def rounds(self, rows: int) -> bool:
        """Whether the inputs of so many rows are rounded."""
        few = PLAIN if self.packed.layout.group == 0 and launch.has_wgmma() else PLAIN_BLOCKS
        return self.is_rounded and rows > few

    def __call__(self, x: Tensor, other: Tensor | None = None) -> Tensor:
        """x: [T, in], or [T, 2 in] as ``gates`` gives; other: [T, out], which ``add`` needs and may
        write its result over."""
        rows = len(x)
        if not self.rounds(rows):
            return self.plain(x, other)
        if rows <= self._own:
            return self._own_products(x, other)
        return self.plain(x, other) if self._multiply is None else self._finished(x, other)

    def gates(self, x: Tensor) -> Tensor | None:
        """As ``TakesGates`` (ops/linear.py)."""
        if not self.silu or not self.takes_gates or len(x) <= self._own:
            return None
        assert self._multiply is not None
        y = self._multiply(x)
        return y if self.bias is None else y.add_(self.bias)

    def _rounded(
        self, x: Tensor, pdl: int, group: int, by_group: bool = False
    ) -> tuple[Tensor, Tensor]:
        silu = x.shape[1] == 2 * self.packed.layout.inputs
        return rounded(x.contiguous(), E4M3, pdl, group, self.input_scale, by_group, silu)

    def _own_products(self, x: Tensor, other: Tensor | None) -> Tensor:
        rows, pdl = len(x), launch.pdl_for(len(x))
        plan = self.plan(rows)
        values, scales = self._rounded(x, pdl, self.packed.layout.group)
        dtype = torch.float32 if self.epilogue == "logits" else self.dtype
        y = torch.empty(rows, self.out_features, dtype=dtype, device=x.device)
        other = None if other is None else other.contiguous()
        packed_skinny(
            plan, tile_of(rows), values, self.packed, self.bias, other, None, y,
            self._arrived, self.silu, pdl, scales,
        )  # fmt: skip
        return y

    def _by_rows(self, x: Tensor) -> Tensor:
        values, scales = self._rounded(x, launch.OFF, 0)
        return torch._scaled_mm(
            values, self.packed.words.t(), scales, self._scales, out_dtype=torch.bfloat16
        )

    def _by_blocks(self, x: Tensor) -> Tensor:
        rows = len(x)
        if rows % 4:
            x = F.pad(x, (0, 0, 0, -rows % 4))
        values, scales = self._rounded(x, launch.OFF, BLOCK, by_group=True)
        y = F.scaled_mm(
            values,
            self.packed.words.t(),
            scales,
            F.ScalingType.BlockWise1x128,
            self._scales,
            F.ScalingType.BlockWise128x128,
            output_dtype=torch.bfloat16,
        )
        return y[:rows]

    def _finished(self, x: Tensor, other: Tensor | None) -> Tensor:
        assert self._multiply is not None
        y = self._multiply(x)
        return self.plain.finished(y.float() if self.epilogue == "logits" else y, other)


@register("float8_linear", "triton", available)
class TritonFloat8Linear:
    def __init__(
        self,
        weights: Sequence[Float8Weight],
        bias: Tensor | None,
        epilogue: Epilogue,
        dtype: torch.dtype,
    ) -> None:
        """As the definition (ops/float8.py). Weights with given scales of inputs are multiplied
        together by the largest of them."""
        self.epilogue = epilogue
        kinds = together(weights)
        inside: Epilogue = epilogue if len(kinds) == 1 or epilogue == "logits" else "none"
        biases = split(bias, [weight.shape[0] for weight in kinds])
        self.parts = []
        for weight, part in zip(kinds, biases):
            assert isinstance(weight, Float8Weight)
            self.parts.append(Float8Linear(weight, part, inside, dtype))

    def __call__(self, x: Tensor, other: Tensor | None = None) -> Tensor:
        """As ``linear`` (ops/linear.py), in x's dtype."""
        if len(self.parts) == 1:
            return self.parts[0](x, other)
        y = torch.cat([part(x) for part in self.parts], dim=1)
        if other is not None:
            return y.add_(other)
        return silu_mul(y) if self.epilogue == "silu_mul" else y

    @property
    def takes_gates(self) -> bool:
        return len(self.parts) == 1 and self.parts[0].takes_gates

    def gates(self, x: Tensor) -> Tensor | None:
        return self.parts[0].gates(x) if len(self.parts) == 1 else None

    def rows(self, ids: Tensor) -> Tensor:
        """ids: int64 [r]. Rows of the weight, [r, in], in the linear's dtype; of one weight."""
        (part,) = self.parts
        return part.plain.rows(ids)
