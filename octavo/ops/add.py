"""Scaled sums: definition."""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.ops.registry import register


@register("add_scaled", "torch")
def add_scaled(x: Tensor | None, other: Tensor, scale: float) -> Tensor:
    """x + scale * other, both [T, n] of one dtype, rounded once; without x scale * other. May be
    written over ``x``."""
    return other * scale if x is None else torch.add(x, other, alpha=scale)
