"""What the layers of a step share: attention operations by geometry, ropes, and states prepared
once per pair of both."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from octavo.model.batch import ForwardBatch
from octavo.model.rope import Rope
from octavo.model.spec import RopeSpec, TensorScaling


@dataclass(frozen=True)
class StateKey:
    """Layers of one key share a state. ``geometry``: of their attention operation, whatever its
    kind. ``head_dim``: of what turns."""

    geometry: Any
    rope: RopeSpec | None
    head_dim: int


class RopeFactors:
    """The checkpoint's own divisors of the rotary frequencies, FP32 [size]."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.factors: Tensor

    def wanted(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        yield "rope_factors.weight", (self.size,)

    def load(self, tensors: Mapping[str, Any]) -> None:
        self.factors = tensors["rope_factors.weight"].float()


class AttentionStates:
    """``ops``: the chosen versions by name. ``cache_dtype``: see ``AttentionGeometry``."""

    def __init__(
        self,
        ops: Mapping[str, Callable[..., Any]],
        dtype: torch.dtype,
        device: str,
        cache_dtype: torch.dtype | None = None,
    ) -> None:
        self._ops = ops
        self.cache_dtype = cache_dtype
        self._dtype = dtype
        self._device = device
        self._operations: dict[Any, Any] = {}  # by geometry
        self._keys: list[StateKey] = []
        self._pairs: list[tuple[Any, Rope]] = []  # operation and rope of each key
        self.factors: RopeFactors | None = None

    def use(self, op: str, key: StateKey) -> Any:
        """The version of ``op`` for ``key.geometry``, one for all layers of that geometry."""
        if key not in self._keys:
            self._keys.append(key)
        if key.rope and isinstance(key.rope.scaling, TensorScaling):
            self.factors = RopeFactors((key.rope.dim or key.head_dim) // 2)
        if key.geometry not in self._operations:
            self._operations[key.geometry] = self._ops[op](key.geometry)
        return self._operations[key.geometry]

    def index(self, key: StateKey) -> int:
        """Which of the states that ``prepare`` gives is that of ``key``."""
        return self._keys.index(key)

    def finish(self, max_position: int) -> None:
        """Makes the ropes, once ``factors`` are loaded."""
        factors = self.factors.factors if self.factors else None
        self._pairs = [
            (
                self._operations[key.geometry],
                Rope(key.rope, key.head_dim, max_position, factors, self._device),
            )
            for key in self._keys
        ]

    def prepare(self, batch: ForwardBatch) -> list[Any]:
        return [operation.prepare(batch, rope, self._dtype) for operation, rope in self._pairs]
