"""Random weights from a config.json alone: for benchmarks and tests of any shape."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from octavo.model.families.names import Names, Place
from octavo.model.spec import DecoderSpec

_POOL = 1_000_003  # a prime: tiled rows of any width differ


class DummySource:
    """Seeded: matrices N(0, 1 / in), norms 1, biases small; the same for the same seed and device.

    On a CPU numbers are cut from a pool of a million; a GPU draws each one, where it will lie.
    """

    shapes = None
    names: ClassVar[Names] = {}

    def __init__(
        self,
        path: Path,
        spec: DecoderSpec,
        seed: int,
        device: str = "cpu",
        dtype: torch.dtype | None = None,
    ) -> None:
        self.where = str(path)
        self.spec = spec
        self.dtype = dtype
        self.device = device
        self._generator = torch.Generator(device).manual_seed(seed)
        if device == "cpu":
            self._pool = torch.randn(_POOL, generator=self._generator)
            self._offset = 0

    def expert_pieces(self, name: str, shape: tuple[int, ...]) -> tuple[()]:
        return ()

    def place(self, name: str) -> Place:
        return Place(name)

    def count_groups(self) -> tuple[int, int]:
        return 0, 0

    def keeps_groups(self, name: str) -> bool:
        return False

    def bytes_packed(self, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype) -> int:
        return sum(map(math.prod, shapes.values())) * dtype.itemsize

    def fetch(
        self, name: str, shape: tuple[int, ...], dtype: torch.dtype, first: int = 0
    ) -> Callable[[], Tensor]:
        return partial(self._make, name, shape, dtype)

    def close(self) -> None:
        pass

    def _make(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        if name.endswith("norm.weight") or name.startswith("rope_factors"):
            return torch.ones(shape, dtype=dtype, device=self.device)
        scale = 1 / math.sqrt(shape[-1]) if len(shape) > 1 else 0.02
        if self.device != "cpu":
            empty = torch.empty(shape, dtype=dtype, device=self.device)
            return empty.normal_(0.0, scale, generator=self._generator)
        count = math.prod(shape)
        self._offset = (self._offset + 7919) % _POOL
        pool = self._pool.roll(-self._offset).mul_(scale).to(dtype)
        return pool.repeat(-(-count // _POOL))[:count].view(shape).clone()
