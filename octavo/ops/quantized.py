"""Linears on weights of an even grid and inputs rounded to 8 bits: the definition.

Each row of each group of inputs is rounded by a scale of its own, so that products are integers,
whose sums are exact: the arithmetic of GGUF's CPU kernels (Q8_1 activations), and with one group
over all inputs that of W8A8 per channel with dynamic scales.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.ops.joined import alike
from octavo.ops.linear import Epilogue, finished
from octavo.ops.registry import register
from octavo.ops.weights import ZERO, QuantizedWeight

LEVELS = 127  # inputs become whole numbers of -127 .. 127


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
        self._group, self._order = weights[0].group, weights[0].order
        self._weight = torch.cat([replace(weight, order=None).dense() for weight in weights])
        self._bias, self._epilogue, self._dtype = bias, epilogue, dtype

    def __call__(self, x: Tensor, other: Tensor | None = None) -> Tensor:
        """As ``linear`` (ops/linear.py), in x's dtype."""
        wide = self._weight.dtype
        if self._order is not None:
            x = x[:, self._order]
        # Rounding is defined in FP32 at most: in more, ties would fall otherwise.
        y = rounded(x.float(), self._group).to(wide) @ self._weight.T
        return finished(y, self._bias, self._epilogue, other, self._dtype)

    def rows(self, ids: Tensor) -> Tensor:
        """ids: int64 [r]. Rows of the weight, [r, in], in the linear's dtype; without epilogue or
        with ``logits``."""
        found = self._weight[ids].to(self._dtype)
        return found if self._order is None else found[:, self._order.argsort()]
