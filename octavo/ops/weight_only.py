"""Linears on weights of any kind and inputs as they are: the definition.

Weights are what they stand for (``dense()``), inputs are not rounded. A version never holds a whole
expanded copy of its weights.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from octavo.ops.linear import Epilogue, finished
from octavo.ops.registry import register
from octavo.ops.weights import Weight, dense

_VALUES_AT_A_TIME = 1 << 22


@register("weight_only_linear", "torch")
class TorchWeightOnlyLinear:
    """The definition: some of the outputs are expanded at a time, products are formed in FP32, or
    in FP64 for inputs in FP64."""

    def __init__(
        self, weights: Sequence[Weight], bias: Tensor | None, epilogue: Epilogue, dtype: torch.dtype
    ) -> None:
        """weights: of any kinds; their rows follow one another; with ``silu_mul`` the gate's, then
        the up projection's, or one whose halves they are. bias: [sum out_i]. dtype: of x and y;
        ``logits`` are in FP32."""
        self._weights, self._bias = list(weights), bias
        self._epilogue, self._dtype = epilogue, dtype
        self._step = max(1, _VALUES_AT_A_TIME // weights[0].shape[1])

    def __call__(self, x: Tensor, other: Tensor | None = None) -> Tensor:
        """As ``linear`` (ops/linear.py), in x's dtype."""
        wide = torch.promote_types(x.dtype, torch.float32)
        parts = [
            x.to(wide) @ dense(weight[begin : begin + self._step], wide).T
            for weight in self._weights
            for begin in range(0, weight.shape[0], self._step)
        ]
        y = torch.cat(parts, dim=1)
        return finished(y, self._bias, self._epilogue, other, self._dtype)

    def rows(self, ids: Tensor) -> Tensor:
        """ids: int64 [r]. Rows of the weight, [r, in], in the linear's dtype; of one weight."""
        (weight,) = self._weights
        return dense(weight[ids], self._dtype)
