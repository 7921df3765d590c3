"""Activations that no linear has as an epilogue, and soft caps of logits: definitions.

ATen computes most of a tensor on a CPU in vectors and what is left of each thread's share one by
one, which differs in the last bit: with several rows at once, by where a row lies. Its kernels for
GPUs compute every number alike.
"""

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
    2016).
    """
    if gated:
        gate, up = x.chunk(2, dim=-1)
        return _pointwise(gate, kind).mul_(up)
    return _pointwise(x, kind)


@register("soft_cap", "torch")
def soft_cap(x: Tensor, cap: float) -> Tensor:
    """cap * tanh(x / cap), x FP32 [T, n], which may be written over."""
    return x.div_(cap).tanh_().mul_(cap)


def _on_cpu(device: str, dtype: torch.dtype) -> bool:
    return device == "cpu"


def _on_gpu(device: str, dtype: torch.dtype) -> bool:
    return device == "cuda"


@register("activate", "by-row", _on_cpu, batch_invariant="at a price")
def activate_by_row(x: Tensor, kind: Kind, gated: bool) -> Tensor:
    """Some 10 us a row."""
    if not len(x):
        return activate(x, kind, gated)
    return torch.cat([activate(row, kind, gated) for row in x.split(1)])


@register("soft_cap", "by-row", _on_cpu, batch_invariant="at a price")
def soft_cap_by_row(x: Tensor, cap: float) -> Tensor:
    for row in x.split(1):
        soft_cap(row, cap)  # in place
    return x


@register("activate", "cuda", _on_gpu, batch_invariant="yes")
def activate_on_gpu(x: Tensor, kind: Kind, gated: bool) -> Tensor:
    return activate(x, kind, gated)


@register("soft_cap", "cuda", _on_gpu, batch_invariant="yes")
def soft_cap_on_gpu(x: Tensor, cap: float) -> Tensor:
    return soft_cap(x, cap)


def _pointwise(x: Tensor, kind: Kind) -> Tensor:
    if kind == "silu":
        return F.silu(x)
    if kind == "relu":
        return torch.relu(x)
    return F.gelu(x, approximate="tanh" if kind == "gelu_tanh" else "none")
