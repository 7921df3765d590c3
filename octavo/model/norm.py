"""RMS norm with its weight."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from torch import Tensor

from octavo.model.spec import NormSpec


@dataclass
class Norm:
    """``name``: our parameter name. ``operation``: the chosen version of ``rms_norm``."""

    name: str
    spec: NormSpec
    size: int
    operation: Callable[[Tensor, Tensor, float], Tensor]
    weight: Tensor = field(init=False)

    def wanted(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        yield f"{self.name}.weight", (self.size,)

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        self.weight = tensors[f"{self.name}.weight"]

    def __call__(self, x: Tensor) -> Tensor:
        return self.operation(x, self.weight, self.spec.eps)
