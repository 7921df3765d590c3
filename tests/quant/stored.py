"""Random contents of stored tensors, and what tests of formats ask of them."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from octavo.quant.format import CheckpointFormat
from tests.quant.slow_readers import Array


def words(rng: np.random.Generator, *shape: int) -> Tensor:
    """int32, every bit random."""
    return torch.from_numpy(rng.integers(-(1 << 31), 1 << 31, shape, dtype=np.int64)).int()


def numbers(rng: np.random.Generator, *shape: int, dtype: torch.dtype = torch.float16) -> Tensor:
    return torch.from_numpy(rng.normal(size=shape)).to(dtype)


def encoded(tensor: Tensor) -> dict[str, Any]:
    """For a JSON file of vectors."""
    raw = torch.empty(tensor.numel(), dtype=tensor.dtype).copy_(tensor.flatten()).view(torch.uint8)
    return {
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "shape": list(tensor.shape),
        "base64": base64.b64encode(raw.numpy().tobytes()).decode(),
    }


def decoded(stored: dict[str, Any]) -> Tensor:
    raw = bytearray(base64.b64decode(stored["base64"]))
    return torch.frombuffer(raw, dtype=getattr(torch, stored["dtype"])).view(stored["shape"])


def vectors(name: str) -> dict[str, Any]:
    """What the script of that name wrote."""
    found: dict[str, Any] = json.loads(
        (Path(__file__).parent / "vectors" / f"{name}.json").read_text()
    )
    return found


def equal(one: Tensor, other: Array) -> None:
    """Bit for bit, but for the sign of zero."""
    assert one.dtype == torch.float32
    np.testing.assert_array_equal(one.numpy(), other)


def declared(
    format: CheckpointFormat, tensors: dict[str, Tensor], outputs: int, inputs: int
) -> None:
    """Whether tensors are as the format declares them."""
    found = {tensor.suffix: tensor for tensor in format.tensors()}
    assert set(tensors) <= set(found)
    assert {name for name, tensor in found.items() if not tensor.optional} <= set(tensors)
    for name, stored in tensors.items():
        shapes = found[name].shapes(outputs, inputs)
        assert any(
            len(shape) == stored.dim()
            and all(a in (-1, b) for a, b in zip(shape, stored.shape, strict=True))
            for shape in shapes
        ), (name, shapes, stored.shape)
