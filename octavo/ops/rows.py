"""Some rows of a matrix: the tokens of a step whose logits are wanted."""

from __future__ import annotations

from torch import Tensor

from octavo.ops.registry import register


@register("take_rows", "torch", batch_invariant="yes")
def take_rows(x: Tensor, index: Tensor) -> Tensor:
    """x: [T, n]; index: int64 [r], each in 0 .. T - 1. Returns [r, n]."""
    return x[index]
