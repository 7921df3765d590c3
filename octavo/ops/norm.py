"""RMS norm, alone and after a residual addition: definitions."""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.ops.registry import register


@register("rms_norm", "torch")
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2, -1) + eps) * weight over the last axis, computed in FP32 at least."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (wide * scale).to(x.dtype) * weight
