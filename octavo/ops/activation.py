"""Activations that no linear has as an epilogue: definition."""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.ops.registry import register

Kind = Literal["silu", "gelu", "gelu_tanh", "relu"]


@register("activate", "torch")
def activate(x: Tensor, kind: Kind, gated: bool) -> Tensor:
    """x: [T, n]. activation(x), or with ``gated`` activation(first half) * second half, [T, n / 2].

    ``gelu``: x * Phi(x) by erf; ``gelu_tanh``: the tanh approximation of it (Hendrycks & Gimpel
    2016). On a CPU, ATen computes most of a tensor in vectors and the rest one by one, which
    differs in the last bit by where a row lies.
    """
    return _activated(x, kind, gated)


@register("activate", "cuda", lambda device, dtype: device == "cuda", batch_invariant="yes")
def activate_on_gpu(x: Tensor, kind: Kind, gated: bool) -> Tensor:
    """The same: ATen's kernels for GPUs compute every number alike."""
    return _activated(x, kind, gated)


def _activated(x: Tensor, kind: Kind, gated: bool) -> Tensor:
    if gated:
        gate, up = x.chunk(2, dim=-1)
        return _pointwise(gate, kind).mul_(up)
    return _pointwise(x, kind)


def _pointwise(x: Tensor, kind: Kind) -> Tensor:
    if kind == "silu":
        return F.silu(x)
    if kind == "relu":
        return torch.relu(x)
    return F.gelu(x, approximate="tanh" if kind == "gelu_tanh" else "none")
