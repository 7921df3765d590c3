"""A norm with its weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor

from octavo.model.shard import TensorParallel
from octavo.model.spec import NormSpec, RMSNormSpec
from octavo.model.stages import Range


class Norm:
    """``name``: our parameter name. ``operations``: the chosen versions by name."""

    def __init__(
        self,
        name: str,
        spec: NormSpec,
        size: int,
        operations: Mapping[str, Callable[..., Tensor]],
    ) -> None:
        by_rms = isinstance(spec, RMSNormSpec)
        self.spec = spec
        self.size = size
        self.operation = operations["rms_norm" if by_rms else "layer_norm"]
        self.names = [f"{name}.weight"] if by_rms else [f"{name}.weight", f"{name}.bias"]
        self.tensors: list[Tensor]

    def wanted(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        for name in self.names:
            yield name, (self.size,)

    def load(self, tensors: Mapping[str, Any]) -> None:
        self.tensors = [tensors[name] for name in self.names]

    def __call__(self, x: Tensor) -> Tensor:
        """x: [T, size]. [T, size], normed over the last axis."""
        return self.operation(x, *self.tensors, self.spec.eps)


class SharedNorm:
    """An RMS norm over columns of which each rank has some: ``own`` of ``size``. ``copies``: how
    many ranks have the same ones."""

    def __init__(
        self,
        name: str,
        spec: RMSNormSpec,
        size: int,
        own: Range,
        ranks: TensorParallel,
        copies: int = 1,
    ) -> None:
        self.name = f"{name}.weight"
        self.spec = spec
        self.size = size
        self.own = own
        self.ranks = ranks
        self.copies = copies
        self.weight: Tensor

    def wanted(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        yield self.name, (self.size,)

    def load(self, tensors: Mapping[str, Any]) -> None:
        self.weight = tensors[self.name][slice(*self.own)].float()

    def __call__(self, x: Tensor) -> Tensor:
        """x: [T, own]. The same, divided by the root of the mean square of all ranks' columns."""
        values = x.float()
        squares = values.square().sum(dim=1, keepdim=True) / self.copies
        mean = self.ranks.summed(squares) / self.size
        return (values * (mean + self.spec.eps).rsqrt() * self.weight).to(x.dtype)
