"""Which stored matrices of a checkpoint are quantized, and what each is made of."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from octavo.model.decoder import Model
from octavo.model.layer import Layer
from octavo.model.linear import Linear
from octavo.ops.joined import joined
from octavo.ops.weights import Quantized
from octavo.quantize.layers import quantizable
from octavo.quantize.source import Source
from octavo.types import ConfigError


@dataclass(frozen=True)
class Module:
    """``name``: in the checkpoint, without a suffix. ``parts``: our projections that lie in it, in
    order."""

    name: str
    parts: tuple[str, ...]
    outputs: int
    inputs: int

    def weight(self, quantized: Mapping[str, Quantized]) -> Quantized:
        found = joined([quantized[part] for part in self.parts])
        assert not isinstance(found, Tensor)
        return found


def modules_of(linears: Sequence[Linear], source: Source) -> list[Module]:
    """Raises ConfigError for matrices that are stored the other way round."""
    found: dict[str, list[tuple[int, str, int, int]]] = {}
    for linear in linears:
        for name, outputs in linear.parts:
            place = source.place(f"{name}.weight")
            if place.transposed:
                raise ConfigError(
                    f"{source.path}: {place.name} is stored as inputs by outputs (GPT-2's Conv1D), "
                    "which no quantized format has: not in this version"
                )
            entry = (source.first(f"{name}.weight"), name, outputs, linear.in_features)
            found.setdefault(place.name.removesuffix(".weight"), []).append(entry)
    return [
        Module(
            name,
            tuple(part for _, part, _, _ in sorted(entries)),
            sum(outputs for _, _, outputs, _ in entries),
            entries[0][3],
        )
        for name, entries in found.items()
    ]


def layer_modules(layer: Layer, source: Source) -> list[Module]:
    return modules_of(quantizable(layer), source)


def dense_modules(model: Model, source: Source, head: bool) -> list[str]:
    """Modules with matrices that stay dense, for the format's own tools: of those in layers what
    stands between the layer and a number (``mlp.experts``)."""
    found = {} if head else {"lm_head": None}
    for layer in model.layers:
        taken = {f"{name}.weight" for linear in quantizable(layer) for name, _ in linear.parts}
        for part in layer.parts():
            for name, shape in part.wanted():
                if len(shape) < 2 or name in taken:
                    continue
                stored = "mlp.experts" if ".experts." in name else source.place(name).name
                inner = re.sub(r"^.*layers\.\d+\.", "", stored).removesuffix(".weight")
                found[re.split(r"\.\d+", inner)[0]] = None
    return list(found)
