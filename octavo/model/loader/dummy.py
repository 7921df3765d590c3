"""Random weights from a config.json alone: for benchmarks and tests of any shape."""

from __future__ import annotations

import math
from pathlib import Path

import torch
from torch import Tensor

from octavo.model.spec import DecoderSpec

_POOL = 1_000_003  # a prime: tiled rows of any width differ


class DummySource:
    """Seeded: matrices N(0, 1 / in), norms 1, biases small; the same for the same seed."""

    shapes = None

    def __init__(self, path: Path, spec: DecoderSpec, seed: int) -> None:
        self.where = str(path)
        self.spec = spec
        generator = torch.Generator().manual_seed(seed)
        self._pool = torch.randn(_POOL, generator=generator)
        self._offset = 0

    def stored_name(self, name: str) -> str:
        return name

    def read(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        if name.endswith("norm.weight") or name.startswith("rope_factors"):
            return torch.ones(shape, dtype=dtype)
        scale = 1 / math.sqrt(shape[-1]) if len(shape) > 1 else 0.02
        count = math.prod(shape)
        self._offset = (self._offset + 7919) % _POOL
        pool = self._pool.roll(-self._offset).mul_(scale).to(dtype)
        return pool.repeat(-(-count // _POOL))[:count].view(shape).clone()
