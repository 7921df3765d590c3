"""The MLP of a layer: down(activation(gate(x)) * up(x)), or without a gate."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from octavo.model.linear import Linear
from octavo.model.shard import ALONE, Cut, TensorParallel
from octavo.model.spec import MLPSpec, PlainMLPSpec
from octavo.ops.linear import Epilogue, TakesGates


class MLP:
    """``activate``: the chosen version of that operation; SiLU with a gate is the linear's own.
    ``epilogue``: of the last linear, "add" or "none". ``ranks``: among which the inner numbers are
    divided; ``sums``: results are summed over them, else each gives its part."""

    def __init__(
        self,
        prefix: str,
        spec: MLPSpec | PlainMLPSpec,
        hidden_size: int,
        make_linear: Any,
        activate: Callable[..., Tensor] | None,
        epilogue: Epilogue,
        ranks: TensorParallel = ALONE,
        sums: bool = True,
    ) -> None:
        size = spec.intermediate_size
        self.spec = spec
        own = ranks.shard.inner(size, "an MLP's inner size") if ranks.shard.size > 1 else None
        self.gated = isinstance(spec, MLPSpec)
        self.fused = self.gated and spec.activation == "silu"
        self.activate = activate
        parts = ((f"{prefix}.gate", size), (f"{prefix}.up", size))
        self.gate_up: Linear = make_linear(
            parts if self.gated else parts[1:],
            hidden_size,
            bias=spec.bias,
            epilogue="silu_mul" if self.fused else "none",
            rows=None if own is None else (own,) * (2 if self.gated else 1),
        )
        self._passes_gates = False
        self.down: Linear = make_linear(
            ((f"{prefix}.down", hidden_size),),
            size,
            bias=spec.bias,
            epilogue=epilogue,
            columns=own,
            ranks=ranks if sums else replace(ranks, comm=None),
        )

    def linears(self) -> tuple[Linear, ...]:
        return (self.gate_up, self.down)

    def wanted(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        yield from self.gate_up.wanted()
        yield from self.down.wanted()

    def cuts(self) -> Iterator[tuple[str, Cut]]:
        yield from self.gate_up.cuts()
        yield from self.down.cuts()

    def load(self, tensors: Mapping[str, Any]) -> None:
        self.gate_up.load(tensors)
        self.down.load(tensors)
        first, second = self.gate_up.apply, self.down.apply
        if self.fused and isinstance(first, TakesGates) and isinstance(second, TakesGates):
            self._passes_gates = second.takes_gates

    def experts(self) -> tuple[()]:
        return ()

    def __call__(
        self, x: Tensor, residual: Tensor | None = None, slots: Tensor | None = None
    ) -> Tensor:
        """x: [T, hidden]. [T, hidden], added to ``residual`` (of the same shape) if given, which
        may be written over. ``slots`` makes no difference."""
        if self._passes_gates:
            gates = self.gate_up.gates(x)
            if gates is not None:
                return self.down(gates, residual)
        y = self.gate_up(x)
        if not self.fused:
            assert self.activate is not None
            y = self.activate(y, self.spec.activation, self.gated)
        return self.down(y, residual)
