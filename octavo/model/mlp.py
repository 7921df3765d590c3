"""The gated MLP of a layer: down(silu(gate(x)) * up(x))."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from octavo.model.linear import Linear
from octavo.model.spec import MLPSpec


class MLP:
    def __init__(self, prefix: str, spec: MLPSpec, hidden_size: int, make_linear: Any) -> None:
        size = spec.intermediate_size
        self.gate_up: Linear = make_linear(
            ((f"{prefix}.gate", size), (f"{prefix}.up", size)),
            hidden_size,
            bias=spec.bias,
            epilogue="silu_mul",
        )
        self.down: Linear = make_linear(
            ((f"{prefix}.down", hidden_size),), size, bias=spec.bias, epilogue="add"
        )

    def wanted(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        yield from self.gate_up.wanted()
        yield from self.down.wanted()

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        self.gate_up.load(tensors)
        self.down.load(tensors)

    def __call__(self, x: Tensor, residual: Tensor) -> Tensor:
        return self.down(self.gate_up(x), residual)
