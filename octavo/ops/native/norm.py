"""RMS norm in one call (csrc/norm.h)."""

from __future__ import annotations

from ctypes import c_float, c_int64, c_void_p
from functools import cache

import torch
from torch import Tensor

from octavo.ops.native.library import Features, Kernel, Kernels, function, preferred
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


@cache
def kernel(name: str) -> Kernel:
    return function(name, *(c_void_p,) * 3, c_int64, c_int64, c_float)


@cache
def _chosen(dtype: torch.dtype) -> Kernel:
    name = preferred(KERNELS[dtype])
    assert name is not None, "not available"
    return kernel(name)


def _available(device: str, dtype: torch.dtype) -> bool:
    return device == "cpu" and preferred(KERNELS.get(dtype, ())) is not None


@register("rms_norm", "native", _available, batch_invariant="yes")
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x = x.contiguous()
    y = torch.empty_like(x)
    size = x.shape[-1]
    run = _chosen(x.dtype)
    run(x.data_ptr(), weight.data_ptr(), y.data_ptr(), x.numel() // size, size, eps)
    return y
