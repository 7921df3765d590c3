"""RMS norm in one call (csrc/norm.h)."""

from __future__ import annotations

from ctypes import c_float, c_int64, c_void_p

import torch
from torch import Tensor

from octavo.ops.native import library
from octavo.ops.native.library import Features
from octavo.ops.registry import register

_SETS = {"avx512": Features.AVX512, "avx2": Features.AVX2}  # the preferred one first
_ELEMENTS = {torch.float32: "f32", torch.bfloat16: "bf16"}
_ARGUMENTS = (c_void_p, c_void_p, c_void_p, c_int64, c_int64, c_float)


def kernels(instruction_set: str) -> dict[torch.dtype, library.Kernel]:
    return {
        dtype: library.function(f"octavo_norm_{name}_{instruction_set}", *_ARGUMENTS)
        for dtype, name in _ELEMENTS.items()
    }


def _best() -> dict[torch.dtype, library.Kernel]:
    return next((kernels(n) for n, bit in _SETS.items() if bit in library.features()), {})


_kernels = _best()


def _available(device: str, dtype: torch.dtype) -> bool:
    return device == "cpu" and dtype in _kernels


@register("rms_norm", "native", _available, batch_invariant="yes")
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x = x.contiguous()
    y = torch.empty_like(x)
    size = x.shape[-1]
    _kernels[x.dtype](x.data_ptr(), weight.data_ptr(), y.data_ptr(), x.numel() // size, size, eps)
    return y
