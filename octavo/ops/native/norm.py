"""RMS norm in one call (csrc/norm.h)."""

from __future__ import annotations

from ctypes import Structure, addressof, c_float, c_int64, c_void_p
from functools import cache

import torch
from torch import Tensor

from octavo.ops.native import calls
from octavo.ops.native.library import Features, Kernels, preferred
from octavo.ops.registry import register

KERNELS: dict[torch.dtype, Kernels] = {
    torch.float32: (
        (Features.AVX512, "octavo_norm_f32_avx512"),
        (Features.AVX2, "octavo_norm_f32_avx2"),
    ),
    torch.bfloat16: (
        (Features.AVX512, "octavo_norm_bf16_avx512"),
        (Features.AVX2, "octavo_norm_bf16_avx2"),
    ),
}


class _Call(Structure):
    """OctavoNormCall of csrc/octavo.h."""

    _fields_ = (
        *((name, c_void_p) for name in ("x", "weight", "y", "rows")),
        ("size", c_int64),
        ("eps", c_float),
    )


@cache
def _chosen(dtype: torch.dtype) -> str:
    name = preferred(KERNELS[dtype])
    assert name is not None, "not available"
    return name


def _available(device: str, dtype: torch.dtype) -> bool:
    return device == "cpu" and preferred(KERNELS.get(dtype, ())) is not None


@register("rms_norm", "native", _available, batch_invariant="yes")
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return run(_chosen(x.dtype), x, weight, eps)


def run(kernel: str, x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x = x.contiguous()
    size = x.shape[-1]
    flat = x.view(-1, size)
    y, rows = calls.empty(len(flat), size, x.dtype), calls.rows_of(flat)
    pointers = (x.data_ptr(), weight.data_ptr(), y.data_ptr(), addressof(rows))
    calls.call(kernel, _Call(*pointers, size, eps), weight)
    return y.view(x.shape)
