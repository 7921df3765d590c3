"""Linear layers of a decoder: which checkpoint tensors they need, and how they multiply."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from octavo.model.shard import ALONE, Cut, TensorParallel
from octavo.model.stages import Range
from octavo.ops.cut import inputs_of, outputs_of
from octavo.ops.linear import Epilogue
from octavo.ops.weights import Selected, Weight, dense
from octavo.quant.multiply import LinearVersions
from octavo.quant.rounding import Rounding
from octavo.types import ConfigError


@dataclass
class Linear:
    """One or several projections of the same input, fused by concatenation.

    ``parts``: (our parameter name, out_features). ``rounding``: what dense weights become while
    loading, if anything. ``exact``: the version of ``linear`` that multiplies weights which are
    never to be rounded: of a router, whose rounding would send tokens to other experts. Call it
    after ``load``.

    Sizes are the checkpoint's. A rank that shares the layer keeps ``rows``, of each part the
    outputs that are its own, or ``columns``, the inputs; its results are then summed over
    ``ranks``, if it is given, and one rank adds biases and residuals.
    """

    parts: tuple[tuple[str, int], ...]
    in_features: int
    versions: LinearVersions
    rounding: Rounding | None = None
    bias: bool = False
    epilogue: Epilogue = "none"
    exact: Callable[..., Callable[..., Tensor]] | None = None
    rows: tuple[Range, ...] | None = None
    columns: Range | None = None
    ranks: TensorParallel = ALONE
    apply: Callable[..., Tensor] = field(init=False)

    @property
    def is_rounded(self) -> bool:
        """Whether dense weights are rounded while loading."""
        return self.rounding is not None and self.exact is None

    def wanted(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """(our tensor name, shape) of everything the checkpoint must hold."""
        for name, out_features in self.parts:
            yield f"{name}.weight", (out_features, self.in_features)
            if self.bias:
                yield f"{name}.bias", (out_features,)

    @property
    def _own_epilogue(self) -> Epilogue:
        adds = self.columns is None or self.ranks.leads
        return "none" if self.epilogue == "add" and not adds else self.epilogue

    def cuts(self) -> Iterator[tuple[str, Cut]]:
        """(our tensor name, what of it is kept) of those of which something is not."""
        for index, (name, _) in enumerate(self.parts):
            rows = None if self.rows is None else (self.rows[index],)
            if rows is not None or self.columns is not None:
                yield f"{name}.weight", Cut(rows, self.columns)
            if rows is not None and self.bias:
                yield f"{name}.bias", Cut(rows)

    def load(self, tensors: Mapping[str, Weight]) -> None:
        """tensors: ours by name, in the model's dtype or quantized, whole. They may be released
        afterwards. Raises ConfigError for contents that no version multiplies."""
        weights = [tensors[f"{name}.weight"] for name, _ in self.parts]
        biases = [tensors[f"{name}.bias"] for name, _ in self.parts] if self.bias else []
        if self.columns is not None and not self.ranks.leads:
            biases = []  # added once, to the sum
        if self.rows is not None:
            biases = [outputs_of(bias, (own,)) for bias, own in zip(biases, self.rows)]
        bias = torch.cat(biases) if biases else None  # type: ignore[arg-type]
        if self.exact is not None:
            assert self.rows is None and self.columns is None
            exact = [dense(weight, self.versions.dtype) for weight in weights]
            self.apply = self.exact(exact, bias, self.epilogue)
            return
        if self.rounding is not None:
            weights = [rounded(weight, self.rounding, self.versions) for weight in weights]
        if self.rows is not None:
            weights = [outputs_of(weight, (own,)) for weight, own in zip(weights, self.rows)]
        kept: list[Weight | Selected] = list(weights)
        if self.columns is not None:
            kept = [inputs_of(weight, *self.columns) for weight in weights]
        try:
            self.apply = self.versions.multiplier(kept, bias, self._own_epilogue)
        except ValueError as error:
            names = ", ".join(name for name, _ in self.parts)
            raise ConfigError(f"{names}: {error}") from None

    def __call__(self, x: Tensor, other: Tensor | None = None) -> Tensor:
        """x: [T, in]; other: what the epilogue ``add`` adds, [T, out]. Where a rank has some of the
        inputs or outputs, x or the result has so many columns."""
        if self.columns is None:
            return self.apply(x, other)
        return self.ranks.summed(self.apply(x, other if self.ranks.leads else None))

    def gates(self, x: Tensor) -> Tensor | None:
        """As ``TakesGates``, which its version is."""
        apply: Any = self.apply
        found: Tensor | None = apply.gates(x)
        return found


def rounded(weight: Weight, rounding: Rounding, versions: LinearVersions) -> Weight:
    """What the checkpoint has rounded already stays as it is."""
    return rounding.round(weight, versions) if isinstance(weight, Tensor) else weight
