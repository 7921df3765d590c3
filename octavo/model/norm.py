"""Norms with their weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

from torch import Tensor

from octavo.model.spec import LayerNormSpec, NormSpec, RMSNormSpec


class Norm(Protocol):
    def wanted(self) -> Iterator[tuple[str, tuple[int, ...]]]: ...

    def load(self, tensors: Mapping[str, Any]) -> None: ...

    def __call__(self, x: Tensor) -> Tensor: ...


class RMSNorm:
    """``name``: our parameter name. ``operation``: the chosen version of ``rms_norm``."""

    def __init__(
        self, name: str, spec: RMSNormSpec, size: int, operation: Callable[..., Tensor]
    ) -> None:
        self.name = name
        self.spec = spec
        self.size = size
        self.operation = operation
        self.weight: Tensor

    def wanted(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        yield f"{self.name}.weight", (self.size,)

    def load(self, tensors: Mapping[str, Any]) -> None:
        self.weight = tensors[f"{self.name}.weight"]

    def __call__(self, x: Tensor) -> Tensor:
        return self.operation(x, self.weight, self.spec.eps)


class LayerNorm:
    """``operation``: the chosen version of ``layer_norm``."""

    def __init__(
        self, name: str, spec: LayerNormSpec, size: int, operation: Callable[..., Tensor]
    ) -> None:
        self.name = name
        self.spec = spec
        self.size = size
        self.operation = operation
        self.weight: Tensor
        self.bias: Tensor

    def wanted(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        yield f"{self.name}.weight", (self.size,)
        yield f"{self.name}.bias", (self.size,)

    def load(self, tensors: Mapping[str, Any]) -> None:
        self.weight = tensors[f"{self.name}.weight"]
        self.bias = tensors[f"{self.name}.bias"]

    def __call__(self, x: Tensor) -> Tensor:
        return self.operation(x, self.weight, self.bias, self.spec.eps)


def make_norm(
    name: str, spec: NormSpec, size: int, operations: Mapping[str, Callable[..., Tensor]]
) -> Norm:
    """``operations``: the chosen versions by name."""
    if isinstance(spec, RMSNormSpec):
        return RMSNorm(name, spec, size, operations["rms_norm"])
    return LayerNorm(name, spec, size, operations["layer_norm"])
