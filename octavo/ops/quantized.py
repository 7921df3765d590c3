"""Linears on quantized weights: how such a weight is given, and the definition.

A weight is ``(code - zero) * scale + minimum``, in groups of inputs that share scale and minimum.
Inputs are rounded to 8 bits as well, each row of each group by a scale of its own, so that products
are integers, whose sums are exact: the arithmetic of GGUF's CPU kernels (Q8_1 activations), and
with one group over all inputs that of W8A8 per channel with dynamic scales.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.ops.linear import Epilogue, silu_mul
from octavo.ops.registry import register

LARGEST_GROUP = 65_536  # whose products add up in 32 bits
LEVELS = 127  # inputs become whole numbers of -127 .. 127
ZERO = 128  # of codes made here


@dataclass(frozen=True)
class QuantizedWeight:
    """[out, in], in groups of ``group`` inputs; the last one may be shorter.

    codes: uint8 [out, in], below 2^bits. scales: FP16 or FP32 [out, groups]. minimums: of the
    scales' dtype [out, groups], or None. Raises ValueError for bits other than 4 and 8 and for a
    group that is no multiple of 4 or above ``LARGEST_GROUP``.
    """

    codes: Tensor
    scales: Tensor
    minimums: Tensor | None
    bits: int
    group: int
    zero: int = 0

    def __post_init__(self) -> None:
        if self.bits not in (4, 8):
            raise ValueError(f"codes have 4 or 8 bits, not {self.bits}")
        if self.group % 4 or not 0 < self.group <= LARGEST_GROUP:
            raise ValueError(
                f"a group has a multiple of 4 inputs, at most {LARGEST_GROUP}, not {self.group}"
            )

    @property
    def shape(self) -> torch.Size:
        return self.codes.shape

    def dense(self) -> Tensor:
        """FP32 [out, in]; FP64 where the scales are."""
        dtype = torch.promote_types(self.scales.dtype, torch.float32)
        values = (self.codes.to(dtype) - self.zero) * self._per_input(self.scales).to(dtype)
        return values if self.minimums is None else values + self._per_input(self.minimums)

    def __getitem__(self, index: Tensor | slice) -> QuantizedWeight:
        """Some of the outputs."""
        minimums = None if self.minimums is None else self.minimums[index]
        return replace(self, codes=self.codes[index], scales=self.scales[index], minimums=minimums)

    def _per_input(self, values: Tensor) -> Tensor:
        return values.repeat_interleave(self.group, dim=1)[:, : self.shape[1]]


def alike(weights: Sequence[QuantizedWeight]) -> list[QuantizedWeight]:
    """The same weights in one kind that can hold them all: the most bits, the smallest group, FP32
    scales where one has them, minimums where one has them. Codes of 8 bits are moved to the zero
    ``ZERO`` where they fit. Where zeros differ all the same, each becomes part of the minimums, in
    FP32, which rounds none of a scale of 18 bits or fewer (GGUF's).

    Raises ValueError where groups cannot be cut into the smallest."""
    group, bits = min(weight.group for weight in weights), max(weight.bits for weight in weights)
    if bits == 8 and all(_fits(weight) for weight in weights):
        weights = [_moved(weight) for weight in weights]
    zeros = {weight.zero for weight in weights}
    minimums = len(zeros) > 1 or any(weight.minimums is not None for weight in weights)
    dtype = torch.float32 if len(zeros) > 1 else torch.float16
    for weight in weights:
        dtype = torch.promote_types(dtype, weight.scales.dtype)
    found = []
    for weight in weights:
        if weight.group % group:
            raise ValueError(f"groups of {weight.group} inputs cannot be cut into {group}")
        count = -(-weight.shape[1] // group)
        times = weight.group // group
        scales, low = weight.scales.to(dtype), weight.minimums
        if minimums:
            low = torch.zeros_like(scales) if low is None else low.to(dtype)
            if len(zeros) > 1:
                low = low - scales * weight.zero
        found.append(
            QuantizedWeight(
                weight.codes,
                scales.repeat_interleave(times, dim=1)[:, :count],
                None if low is None else low.repeat_interleave(times, dim=1)[:, :count],
                bits,
                group,
                0 if len(zeros) > 1 else weight.zero,
            )
        )
    return found


def _fits(weight: QuantizedWeight) -> bool:
    """Whether the codes can be moved so that their zero is ``ZERO``."""
    if weight.zero == ZERO:
        return True
    low, high = (int(code) + ZERO - weight.zero for code in torch.aminmax(weight.codes))
    return low >= 0 and high <= 255


def _moved(weight: QuantizedWeight) -> QuantizedWeight:
    if weight.zero == ZERO:
        return weight
    codes = weight.codes + (ZERO - weight.zero)  # both in 8 bits, which wrap
    return replace(weight, codes=codes, bits=8, zero=ZERO)


@register("quantize", "torch", batch_invariant="yes")
def quantize(weight: Tensor, group: int) -> QuantizedWeight:
    """weight: [out, in]; group: inputs that share a scale, a multiple of 4. 8 bits, FP32 scales,
    max |weight| / 127, to the nearest, ties to even."""
    outputs, inputs = weight.shape
    wide = F.pad(weight.float(), (0, -inputs % group)).view(outputs, -1, group)
    largest = wide.abs().amax(dim=-1, keepdim=True)
    codes = (wide * _inverse(largest)).round_().add_(ZERO).to(torch.uint8)
    return of_codes(codes.flatten(1)[:, :inputs], (largest / LEVELS)[..., 0], group)


def of_codes(codes: Tensor, scales: Tensor, group: int) -> QuantizedWeight:
    """codes: uint8 [out, in], around 128; scales: FP32 [out, groups]."""
    return QuantizedWeight(codes, scales, None, 8, group, ZERO)


def _inverse(largest: Tensor) -> Tensor:
    """LEVELS / largest; 0 where that is not finite."""
    levels = torch.tensor(LEVELS, dtype=largest.dtype)  # a number / x would be levels * (1 / x)
    inverse = levels / largest
    return torch.where(inverse.isfinite(), inverse, 0)


class QuantizedLinear(Protocol):
    """A linear made of quantized weights, called many times."""

    def __call__(self, x: Tensor, other: Tensor | None = None) -> Tensor:
        """As ``linear`` (ops/linear.py), in x's dtype."""

    def rows(self, ids: Tensor) -> Tensor:
        """ids: int64 [r]. Rows of the weight, [r, in], in the linear's dtype; without epilogue or
        with ``logits``."""


def rounded(x: Tensor, group: int) -> Tensor:
    """x: [T, in]. What the product sees of it: whole multiples of max |x| / 127 of each row and
    group, to the nearest, ties to even; 0 where that maximum has no finite 127 / max |x|."""
    size = x.shape[1]
    padded: Tensor = F.pad(x, (0, -size % group)).unflatten(1, (-1, group))
    largest = padded.abs().amax(dim=-1, keepdim=True)
    return ((padded * _inverse(largest)).round() * (largest / LEVELS)).flatten(1)[:, :size]


@register("quantized_linear", "torch")
class TorchQuantizedLinear:
    """The definition: weights are expanded, products are formed in FP32."""

    def __init__(
        self,
        weights: Sequence[QuantizedWeight],
        bias: Tensor | None,
        epilogue: Epilogue,
        dtype: torch.dtype,
    ) -> None:
        """weights: their rows follow one another; with ``silu_mul`` the gate's, then the up
        projection's. bias: [sum out_i]. dtype: of x and y; ``logits`` are in FP32."""
        weights = alike(weights)
        self._group = weights[0].group
        self._weight = torch.cat([weight.dense() for weight in weights])
        self._bias, self._epilogue, self._dtype = bias, epilogue, dtype

    def __call__(self, x: Tensor, other: Tensor | None = None) -> Tensor:
        wide = self._weight.dtype
        # Rounding is defined in FP32 at most: in more, ties would fall otherwise.
        y = rounded(x.float(), self._group).to(wide) @ self._weight.T
        if self._bias is not None:
            y = y + self._bias.to(wide)
        if self._epilogue == "logits":
            return y
        if other is not None:
            return (y + other).to(self._dtype)
        return (silu_mul(y) if self._epilogue == "silu_mul" else y).to(self._dtype)

    def rows(self, ids: Tensor) -> Tensor:
        return self._weight[ids].to(self._dtype)
