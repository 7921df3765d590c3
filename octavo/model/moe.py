"""The mixture-of-experts part of a layer: a router, many experts, and those that all tokens take.

Experts are loaded one by one, on a GPU into the tensors that are multiplied from, so that loading
needs room for one expert beside them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from octavo.model.linear import Linear, rounded
from octavo.model.mlp import MLP
from octavo.model.shard import ALONE, Cut, TensorParallel
from octavo.model.spec import MoESpec
from octavo.ops.cut import inputs_of, outputs_of
from octavo.ops.linear import Epilogue
from octavo.ops.moe import ApplyExperts, OfExperts
from octavo.ops.weights import Selected, Weight, dense
from octavo.quant.multiply import LinearVersions
from octavo.quant.rounding import Rounding
from octavo.types import ConfigError


class Experts:
    """The weights of all experts of a layer. ``parts``: each expert, to be loaded in any order; the
    operation is made when the last one is there."""

    def __init__(
        self,
        prefix: str,
        spec: MoESpec,
        hidden_size: int,
        operation: Callable[..., ApplyExperts],
        versions: LinearVersions,
        rounding: Rounding | None,
        ranks: TensorParallel,
    ) -> None:
        """``rounding``: what dense weights become while loading, by ``versions``. ``ranks``: among
        which the inner numbers of each expert are divided."""
        self.prefix = prefix
        self.spec = spec
        self.versions = versions
        self.rounding = rounding
        self.operation = operation
        count, inner = spec.router.num_experts, spec.intermediate_size
        self.shapes: dict[str, tuple[int, ...]] = {
            "gate_up.weight": (2 * inner, hidden_size),
            "down.weight": (hidden_size, inner),
        }
        if spec.bias:
            self.shapes |= {"gate_up.bias": (2 * inner,), "down.bias": (hidden_size,)}
        self.leads = ranks.leads
        self.cuts: dict[str, Cut] = {}
        if ranks.shard.size > 1:
            first, end = ranks.shard.inner(inner, "the experts' inner size")
            both = ((first, end), (inner + first, inner + end))  # of the gate, of the other
            self.cuts = {"gate_up.weight": Cut(both), "down.weight": Cut(columns=(first, end))}
            if spec.bias:
                self.cuts["gate_up.bias"] = Cut(both)
        self.parts = [Expert(f"{prefix}.experts.{index}", index, self) for index in range(count)]
        self._placed: dict[str, OfExperts] = {}
        self._missing = count
        self.apply: ApplyExperts

    def place(self, index: int, tensors: Mapping[str, Weight | Selected]) -> None:
        """tensors: an expert's, by the names of ``shapes``."""
        for name, weight in tensors.items():
            # In FP32 only the definition multiplies on a GPU, and would expand them at each call.
            # Nor is there a kernel for experts whose inputs have to be put in their places first.
            fp32, selected = self.versions.dtype == torch.float32, isinstance(weight, Selected)
            expanded = self.versions.device != "cpu" and (fp32 or selected)
            tensor = dense(weight, self.versions.dtype) if expanded else weight
            if name not in self._placed:
                self._placed[name] = self._room(tensor)
            place = self._placed[name]
            if isinstance(place, Tensor) and not isinstance(tensor, Tensor):
                raise ConfigError(
                    f"{self.prefix}.experts: {name} of expert {index} is quantized, that of others "
                    "is not; on a GPU all or none of a layer's experts are"
                )
            place[index] = tensor  # type: ignore[assignment]
        self._missing -= 1
        if not self._missing:
            self.apply = self._made()
            self._placed = {}

    def _made(self) -> ApplyExperts:
        """Raises ConfigError for experts that a version cannot hold together."""
        try:
            return self.operation(
                self._placed["gate_up.weight"],
                self._placed["down.weight"],
                self.spec.activation,
                self._placed.get("gate_up.bias"),
                self._placed.get("down.bias"),
                self.versions.multiplier,
            )
        except ValueError as error:
            raise ConfigError(f"{self.prefix}.experts: {error}") from None

    def _room(self, first: Weight | Selected) -> OfExperts:
        """A version packs quantized weights one by one, on a CPU all; a GPU's multiplies dense ones
        from one tensor."""
        if self.versions.device == "cpu" or not isinstance(first, Tensor):
            return [first] * len(self.parts)
        shape = (len(self.parts), *first.shape)
        return torch.empty(shape, dtype=first.dtype, device=first.device)


class Expert:
    """One expert, as a part that is loaded at one go."""

    def __init__(self, prefix: str, index: int, experts: Experts) -> None:
        self.prefix = prefix
        self.index = index
        self.experts = experts

    def wanted(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        for name, shape in self.experts.shapes.items():
            yield f"{self.prefix}.{name}", shape

    def cuts(self) -> Iterator[tuple[str, Cut]]:
        for name, cut in self.experts.cuts.items():
            yield f"{self.prefix}.{name}", cut

    def load(self, tensors: Mapping[str, Weight]) -> None:
        own = {name: tensors[f"{self.prefix}.{name}"] for name in self.experts.shapes}
        if rounding := self.experts.rounding:
            for name, weight in own.items():
                if len(weight.shape) == 2:
                    own[name] = rounded(weight, rounding, self.experts.versions)
        kept: dict[str, Weight | Selected] = dict(own)
        for name, cut in self.experts.cuts.items():
            if cut.rows is not None:
                kept[name] = outputs_of(own[name], cut.rows)
            if cut.columns is not None:
                kept[name] = inputs_of(own[name], *cut.columns)
        if "down.bias" in own and not self.experts.leads:
            kept["down.bias"] = torch.zeros_like(own["down.bias"])  # type: ignore[arg-type]
        self.experts.place(self.index, kept)


class MoE:
    """Of ``ops`` it takes ``router``, a linear, ``moe_route`` and ``moe_experts``."""

    def __init__(
        self,
        prefix: str,
        spec: MoESpec,
        hidden_size: int,
        make_linear: Any,
        ops: Mapping[str, Callable[..., Any]],
        epilogue: Epilogue,
        ranks: TensorParallel = ALONE,
    ) -> None:
        self.prefix = prefix
        self.spec = spec
        self.ranks = ranks
        self.route: Callable[..., tuple[Tensor, Tensor]] = ops["moe_route"]
        self.correction: Tensor | None = None
        to_scores = partial(
            make_linear, in_features=hidden_size, epilogue="logits", exact=ops["router"]
        )
        self.router: Linear = to_scores(
            ((f"{prefix}.router", spec.router.num_experts),), bias=spec.router.bias
        )
        self._experts = Experts(
            prefix,
            spec,
            hidden_size,
            ops["moe_experts"],
            self.router.versions,
            self.router.rounding,
            ranks,
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
                ranks,
                sums=False,
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

    def cuts(self) -> Iterator[tuple[str, Cut]]:
        if self.shared:
            yield from self.shared.cuts()
        for expert in self.experts():
            yield from expert.cuts()

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
        ids, weights = self.route(self.router(x), self.spec.router, self.correction, slots)
        if not self.ranks.leads:
            residual = None
        other = residual
        if self.shared and self.shared_gate:
            share = self.shared_gate(x).sigmoid().to(x.dtype)
            other = self.shared(x) * share
            other = other if residual is None else residual + other
        elif self.shared:
            other = self.shared(x, residual)
        return self.ranks.summed(self._experts.apply(x, ids, weights, other))
