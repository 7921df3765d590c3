"""The mixture-of-experts part of a layer: a router, many experts, and those that all tokens take.

The experts' weights are loaded one by one into the tensors that the operation multiplies from, so
that loading needs room for one expert beside them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from octavo.model.linear import Linear
from octavo.model.mlp import MLP
from octavo.model.spec import MoESpec, RouterSpec
from octavo.ops.linear import Epilogue
from octavo.ops.moe import ApplyExperts, Routing
from octavo.quant.dense import Dense


def routing_of(spec: RouterSpec) -> Routing:
    return Routing(
        spec.num_experts,
        spec.top_k,
        spec.score,
        spec.renormalize,
        spec.scale,
        spec.groups,
        spec.groups_kept,
        spec.group_score,
    )


class Experts:
    """The weights of all experts of a layer. ``parts``: each expert, to be loaded in any order; the
    operation is made when the last one is there."""

    def __init__(
        self, prefix: str, spec: MoESpec, hidden_size: int, operation: Callable[..., ApplyExperts]
    ) -> None:
        self.spec = spec
        self.operation = operation
        count, inner = spec.router.num_experts, spec.intermediate_size
        self.shapes: dict[str, tuple[int, ...]] = {
            "gate_up.weight": (2 * inner, hidden_size),
            "down.weight": (hidden_size, inner),
        }
        if spec.bias:
            self.shapes |= {"gate_up.bias": (2 * inner,), "down.bias": (hidden_size,)}
        self.parts = [Expert(f"{prefix}.experts.{index}", index, self) for index in range(count)]
        self._stacked: dict[str, Tensor] = {}
        self._missing = count
        self.apply: ApplyExperts

    def place(self, index: int, tensors: Mapping[str, Tensor]) -> None:
        """tensors: an expert's, by the names of ``shapes``."""
        for name, tensor in tensors.items():
            if name not in self._stacked:
                shape = (len(self.parts), *self.shapes[name])
                self._stacked[name] = torch.empty(shape, dtype=tensor.dtype, device=tensor.device)
            self._stacked[name][index] = tensor
        self._missing -= 1
        if not self._missing:
            self.apply = self.operation(
                self._stacked["gate_up.weight"],
                self._stacked["down.weight"],
                self.spec.activation,
                self._stacked.get("gate_up.bias"),
                self._stacked.get("down.bias"),
            )
            self._stacked = {}


class Expert:
    """One expert, as a part that is loaded at one go."""

    def __init__(self, prefix: str, index: int, experts: Experts) -> None:
        self.prefix = prefix
        self.index = index
        self.experts = experts

    def wanted(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        for name, shape in self.experts.shapes.items():
            yield f"{self.prefix}.{name}", shape

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        own = {name: tensors[f"{self.prefix}.{name}"] for name in self.experts.shapes}
        self.experts.place(self.index, own)


class MoE:
    """Of ``ops`` it takes ``moe_route`` and ``moe_experts``. The router is never quantized: its
    rounding would send tokens to other experts."""

    def __init__(
        self,
        prefix: str,
        spec: MoESpec,
        hidden_size: int,
        make_linear: Any,
        ops: Mapping[str, Callable[..., Any]],
        epilogue: Epilogue,
    ) -> None:
        self.prefix = prefix
        self.spec = spec
        self.route: Callable[..., tuple[Tensor, Tensor]] = ops["moe_route"]
        self.routing = routing_of(spec.router)
        self.correction: Tensor | None = None
        self._experts = Experts(prefix, spec, hidden_size, ops["moe_experts"])
        to_scores = partial(make_linear, in_features=hidden_size, epilogue="logits", format=Dense())
        self.router: Linear = to_scores(
            ((f"{prefix}.router", spec.router.num_experts),), bias=spec.router.bias
        )
        self.shared: MLP | None = None
        self.shared_gate: Linear | None = None
        if spec.shared:
            added: Epilogue = "none" if spec.shared_gate else epilogue
            self.shared = MLP(
                f"{prefix}.shared",
                spec.shared,
                hidden_size,
                make_linear,
                ops.get("activate"),
                added,
            )
        if spec.shared_gate:
            self.shared_gate = to_scores(((f"{prefix}.shared_gate", 1),))

    def experts(self) -> list[Expert]:
        return self._experts.parts

    def linears(self) -> tuple[Linear, ...]:
        gate = (self.shared_gate,) if self.shared_gate else ()
        return (self.router, *gate, *(self.shared.linears() if self.shared else ()))

    def wanted(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        for linear in self.linears():
            yield from linear.wanted()
        if self.spec.router.corrected:
            yield f"{self.prefix}.router.correction", (self.spec.router.num_experts,)

    def load(self, tensors: Mapping[str, Any]) -> None:
        for linear in self.linears():
            linear.load(tensors)
        if self.spec.router.corrected:
            self.correction = tensors[f"{self.prefix}.router.correction"]

    def __call__(
        self, x: Tensor, residual: Tensor | None = None, slots: Tensor | None = None
    ) -> Tensor:
        """x: [T, hidden]. [T, hidden], added to ``residual`` (of the same shape) if given, which
        may be written over. ``slots``: int64 [T], negative for padding, which goes to no expert;
        None where there is none."""
        ids, weights = self.route(self.router(x), self.routing, self.correction, slots)
        other = residual
        if self.shared and self.shared_gate:
            share = self.shared_gate(x).sigmoid().to(x.dtype)
            other = self.shared(x) * share
            other = other if residual is None else residual + other
        elif self.shared:
            other = self.shared(x, residual)
        return self._experts.apply(x, ids, weights, other)
