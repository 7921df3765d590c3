"""Linears in BF16 through VDPBF16PS (csrc/linear.h), on weights packed once.

One packed copy serves a single row and a prompt alike. Every output is one accumulator over
ascending inputs, so a row's bits are the same in any batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import Structure, addressof, c_int64, c_void_p
from functools import cache

import torch
from torch import Tensor

from octavo.ops.linear import Epilogue
from octavo.ops.native import memory
from octavo.ops.native.library import Features, Kernel, features, function
from octavo.ops.registry import register

_VECTOR = 16  # FP32 numbers in a register
_PANEL = 2 * _VECTOR  # lanes
_EPILOGUES: dict[Epilogue, int] = {"none": 0, "add": 1, "silu_mul": 2, "logits": 3}


class _OctavoLinear(Structure):
    _fields_ = (
        ("weights", c_void_p),
        ("bias", c_void_p),
        ("inputs", c_int64),
        ("outputs", c_int64),
        ("epilogue", c_int64),
    )


@cache
def _kernels() -> tuple[Kernel, Kernel]:
    """The one that packs and the one that multiplies."""
    pack = function("octavo_linear_pack", c_void_p, *(c_int64,) * 5, c_void_p)
    return pack, function("octavo_linear_bf16_avx512bf16", *(c_void_p,) * 4, c_int64)


def available(device: str, dtype: torch.dtype) -> bool:
    """Not with AMX: oneDNN uses it, and against that these kernels have not been measured."""
    if device != "cpu" or dtype != torch.bfloat16 or torch.cpu._is_amx_tile_supported():
        return False
    return Features.AVX512_BF16 in features()


@register("linear", "native", available, tolerance=1.0, batch_invariant="yes")
class NativeLinear:
    """``logits`` are in FP32 from the accumulators on; ``add`` writes over its operand."""

    def __init__(self, weights: Sequence[Tensor], bias: Tensor | None, epilogue: Epilogue) -> None:
        """weights: BF16, each [out_i, in]; with ``silu_mul`` the gate's and the up projection's,
        or one whose halves they are. They are copied. Raises ValueError for another dtype."""
        if any(weight.dtype != torch.bfloat16 for weight in weights):
            raise ValueError(f"the weights must be in BF16, not {[w.dtype for w in weights]}")
        silu = epilogue == "silu_mul"
        if silu and len(weights) == 1:
            weights = weights[0].chunk(2)
        self._inputs = weights[0].shape[1]
        rows = sum(len(weight) for weight in weights)
        self._outputs = rows // 2 if silu else rows
        panels = -(-self._outputs // (_VECTOR if silu else _PANEL))
        self._panels = memory.zeros(panels * -(-self._inputs // 2) * _PANEL * 4)
        pack, self._multiply = _kernels()
        first = 0
        for index, weight in enumerate(weights):
            # Gate and up share panels, half of the lanes each; other weights follow one another.
            place = (0, _VECTOR, index * _VECTOR) if silu else (first, _PANEL, 0)
            weight, to = weight.contiguous(), self._panels.data_ptr()
            pack(weight.data_ptr(), len(weight), self._inputs, *place, to)
            first += len(weight)
        self._bias = None if bias is None else _by_lane(bias, panels, silu)
        self._linear = _OctavoLinear(
            self._panels.data_ptr(),
            None if self._bias is None else self._bias.data_ptr(),
            self._inputs,
            self._outputs,
            _EPILOGUES[epilogue],
        )
        self._at = addressof(self._linear)
        self._adds = epilogue == "add"
        self._dtype = torch.float32 if epilogue == "logits" else torch.bfloat16

    def __call__(self, x: Tensor, other: Tensor | None = None) -> Tensor:
        """x: BF16 [T, in]; other: BF16 [T, out], which ``add`` needs. Raises ValueError if they do
        not fit."""
        rows = x.shape[0]
        if x.shape[1] != self._inputs or x.dtype != torch.bfloat16:
            raise ValueError(f"x must be BF16 [T, {self._inputs}], not {x.dtype} {[*x.shape]}")
        x = x.contiguous()
        if not self._adds:
            if other is not None:
                raise ValueError("only the epilogue add takes an operand")
            y = torch.empty(rows, self._outputs, dtype=self._dtype)
            self._multiply(self._at, x.data_ptr(), None, y.data_ptr(), rows)
            return y
        if other is None or other.shape != (rows, self._outputs) or other.dtype != self._dtype:
            raise ValueError(f"the epilogue add needs an operand BF16 [{rows}, {self._outputs}]")
        other = other.contiguous()
        y = torch.empty_like(other) if other is x else other
        self._multiply(self._at, x.data_ptr(), other.data_ptr(), y.data_ptr(), rows)
        return y


def _by_lane(bias: Tensor, panels: int, silu: bool) -> Tensor:
    """FP32 [panels, 32]: the bias in the order of the lanes, zeros where there is no output."""
    parts = bias.float().chunk(2) if silu else (bias.float(),)
    width = _PANEL // len(parts)
    lanes = torch.zeros(len(parts), panels * width)
    for lane, part in zip(lanes, parts):
        lane[: len(part)] = part
    return lanes.view(len(parts), panels, width).transpose(0, 1).reshape(panels, _PANEL)
