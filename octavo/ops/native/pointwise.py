"""Layer norms, activations and scaled sums, each in one call (csrc/pointwise.h)."""

from __future__ import annotations

from ctypes import Structure, addressof, c_float, c_int64, c_void_p
from functools import cache

import torch
from torch import Tensor

from octavo.ops.activation import Kind
from octavo.ops.native import calls
from octavo.ops.native.library import Features, preferred
from octavo.ops.registry import register

_DTYPES = {torch.float32: "f32", torch.bfloat16: "bf16"}
_ISAS = ((Features.AVX512, "avx512"), (Features.AVX2, "avx2"))
_KINDS: dict[Kind, int] = {"silu": 0, "gelu": 1, "gelu_tanh": 2, "relu": 3}


class _LayerNorm(Structure):
    """OctavoLayerNormCall of csrc/octavo.h."""

    _fields_ = (
        *((name, c_void_p) for name in ("x", "weight", "bias", "y", "rows")),
        ("size", c_int64),
        ("eps", c_float),
    )


class _Activate(Structure):
    """OctavoActivateCall."""

    _fields_ = (
        *((name, c_void_p) for name in ("x", "y", "rows")),
        *((name, c_int64) for name in ("size", "activation", "gated")),
    )


class _Add(Structure):
    """OctavoAddCall."""

    _fields_ = (
        *((name, c_void_p) for name in ("x", "other", "y", "rows")),
        ("size", c_int64),
        ("scale", c_float),
    )


@cache
def _kernel(operation: str, dtype: torch.dtype) -> str:
    isa = preferred(_ISAS)
    assert isa is not None, "not available"
    return f"octavo_{operation}_{_DTYPES[dtype]}_{isa}"


def _available(device: str, dtype: torch.dtype) -> bool:
    return device == "cpu" and dtype in _DTYPES and preferred(_ISAS) is not None


@register("layer_norm", "native", _available, batch_invariant="yes")
def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    return run_layer_norm(_kernel("layer_norm", x.dtype), x, weight, bias, eps)


@register("activate", "native", _available, batch_invariant="yes")
def activate(x: Tensor, kind: Kind, gated: bool) -> Tensor:
    return run_activate(_kernel("activate", x.dtype), x, kind, gated)


@register("add_scaled", "native", _available, batch_invariant="yes")
def add_scaled(x: Tensor | None, other: Tensor, scale: float) -> Tensor:
    return run_add(_kernel("add", other.dtype), x, other, scale)


def run_layer_norm(kernel: str, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    x, size = x.contiguous(), x.shape[1]
    y, rows = calls.empty(len(x), size, x.dtype), calls.rows_of(x)
    pointers = (x.data_ptr(), weight.data_ptr(), bias.data_ptr(), y.data_ptr(), addressof(rows))
    calls.call(kernel, _LayerNorm(*pointers, size, eps), weight, bias)
    return y


def run_activate(kernel: str, x: Tensor, kind: Kind, gated: bool) -> Tensor:
    x = x.contiguous()
    size = x.shape[1] // (2 if gated else 1)
    y, rows = calls.empty(len(x), size, x.dtype), calls.rows_of(x)
    pointers = (x.data_ptr(), y.data_ptr(), addressof(rows))
    calls.call(kernel, _Activate(*pointers, size, _KINDS[kind], gated))
    return y


def run_add(kernel: str, x: Tensor | None, other: Tensor, scale: float) -> Tensor:
    x, other = None if x is None else x.contiguous(), other.contiguous()
    y = calls.empty(len(other), other.shape[1], other.dtype) if x is None else x
    rows = calls.rows_of(other)
    pointers = (None if x is None else x.data_ptr(), other.data_ptr(), y.data_ptr())
    calls.call(kernel, _Add(*pointers, addressof(rows), other.shape[1], scale))
    return y
