"""Rows of a matrix, an embedding's among them, by a kernel that a tape can hold."""

from __future__ import annotations

from ctypes import Structure, addressof, c_int64, c_void_p

import torch
from torch import Tensor

from octavo.ops.native import calls, library
from octavo.ops.registry import register


class _Call(Structure):
    """OctavoTakeCall of csrc/octavo.h."""

    _fields_ = (
        *((name, c_void_p) for name in ("x", "index", "y", "rows")),
        ("row_bytes", c_int64),
    )


def _available(device: str, dtype: torch.dtype) -> bool:
    return device == "cpu" and bool(library.features())


@register("embedding", "native", _available, batch_invariant="yes")
def embedding(ids: Tensor, weight: Tensor) -> Tensor:
    return take_rows(weight, ids)


@register("take_rows", "native", _available, batch_invariant="yes")
def take_rows(x: Tensor, index: Tensor) -> Tensor:
    x, index = x.contiguous(), index.contiguous()
    y, rows = calls.empty(len(index), x.shape[1], x.dtype), calls.rows_of(index)
    pointers = (x.data_ptr(), index.data_ptr(), y.data_ptr(), addressof(rows))
    arguments = _Call(*pointers, x.shape[1] * x.element_size())
    calls.call("octavo_take_rows", arguments, rows)
    return y
