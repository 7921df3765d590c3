"""Experts on a CPU as packed linears (octavo.ops.native)."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable

import torch
from torch import Tensor

from octavo.ops.linear import Apply, Epilogue
from octavo.ops.moe import Activation, MakeLinear, OfExperts, check_shapes, swiglu_clamped
from octavo.ops.native.linear import NativeLinear
from octavo.ops.registry import register, runnable
from octavo.ops.weights import Weight


def _available(device: str, dtype: torch.dtype) -> bool:
    """Where linears are the native ones."""
    return device == "cpu" and runnable("linear", device, dtype)[-1].name == "native"


def _give_back() -> None:
    """What was let go, to the system: a layer's weights stay with glibc's allocator otherwise."""
    with contextlib.suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL("libc.so.6").malloc_trim(0)


def _made(
    weight: Weight, bias: Tensor | None, epilogue: Epilogue, linear: MakeLinear | None
) -> Apply:
    if isinstance(weight, Tensor):
        return NativeLinear([weight], bias, epilogue)
    if linear is None:
        raise ValueError(f"experts of {type(weight).__name__} without what makes linears of them")
    return linear([weight], bias, epilogue)


@register("moe_experts", "native", _available)
class NativeExperts:
    """Pairs of token and expert are sorted by expert; an expert's are multiplied at once."""

    def __init__(
        self,
        gate_up: OfExperts,
        down: OfExperts,
        activation: Activation = "silu_mul",
        gate_up_bias: OfExperts | None = None,
        down_bias: OfExperts | None = None,
        linear: MakeLinear | None = None,
    ) -> None:
        """Weights are copied; those in lists are let go one by one. Dense ones are multiplied by
        ``linear``'s native version, quantized ones by what ``linear`` makes of them. Raises
        ValueError for weights that do not belong together, for dense ones of other dtypes than BF16
        and FP32, and for quantized ones without ``linear``."""
        self.num_experts, *_ = check_shapes(gate_up, down, gate_up_bias, down_bias)
        fused = activation == "silu_mul"
        self._activate: Callable[[Tensor], Tensor] | None = None if fused else swiglu_clamped
        self._linears: list[tuple[Apply, Apply]] = []
        for expert in range(self.num_experts):
            up_bias = None if gate_up_bias is None else gate_up_bias[expert]
            bias = None if down_bias is None else down_bias[expert]
            up = _made(gate_up[expert], up_bias, "silu_mul" if fused else "none", linear)
            self._linears.append((up, _made(down[expert], bias, "none", linear)))
            for weights in (gate_up, down):
                if isinstance(weights, list):
                    weights[expert] = torch.empty(0)
        _give_back()

    def __call__(
        self, x: Tensor, ids: Tensor, weights: Tensor, other: Tensor | None = None
    ) -> Tensor:
        """x, other: [T, h]; ids: int32, weights: FP32, both [T, k]."""
        top_k, flat = ids.shape[1], ids.flatten().long()
        order = flat.argsort(stable=True)
        tokens, shares = order // top_k, weights.flatten()[order, None]
        none, *counts = torch.bincount(flat + 1, minlength=self.num_experts + 1).tolist()
        y = torch.zeros_like(x, dtype=torch.float32)
        start = none
        for (up, down), count in zip(self._linears, counts, strict=True):
            if not count:
                continue
            mine = slice(start, start + count)
            inner = up(x[tokens[mine]])
            inner = inner if self._activate is None else self._activate(inner)
            y.index_add_(0, tokens[mine], down(inner).float().mul_(shares[mine]))
            start += count
        return (y if other is None else y + other).to(x.dtype)
