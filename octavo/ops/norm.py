"""RMS norm and layer norm: definitions."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.ops.registry import register


@register("rms_norm", "torch")
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2, -1) + eps) * weight over the last axis, computed in FP32 at least."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (wide * scale).to(x.dtype) * weight


@register("layer_norm", "torch", batch_invariant="yes")
def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """(x - mean(x)) / sqrt(var(x) + eps) * weight + bias over the last axis. ATen's kernels take
    each row by itself, whatever the batch."""
    return F.layer_norm(x, weight.shape, weight, bias, eps)
