"""Linear layers of a decoder: which checkpoint tensors they need, and how they multiply."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from octavo.ops.linear import Epilogue
from octavo.ops.weights import Weight, dense
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
    """

    parts: tuple[tuple[str, int], ...]
    in_features: int
    versions: LinearVersions
    rounding: Rounding | None = None
    bias: bool = False
    epilogue: Epilogue = "none"
    exact: Callable[..., Callable[..., Tensor]] | None = None
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

    def load(self, tensors: Mapping[str, Weight]) -> None:
        """tensors: ours by name, in the model's dtype or quantized. They may be released
        afterwards. Raises ConfigError for contents that no version multiplies."""
        weights = [tensors[f"{name}.weight"] for name, _ in self.parts]
        biases = [tensors[f"{name}.bias"] for name, _ in self.parts] if self.bias else []
        bias = torch.cat(biases) if biases else None  # type: ignore[arg-type]
        if self.exact is not None:
            exact = [dense(weight, self.versions.dtype) for weight in weights]
            self.apply = self.exact(exact, bias, self.epilogue)
            return
        if self.rounding is not None:
            weights = [rounded(weight, self.rounding, self.versions) for weight in weights]
        try:
            self.apply = self.versions.multiplier(weights, bias, self.epilogue)
        except ValueError as error:
            names = ", ".join(name for name, _ in self.parts)
            raise ConfigError(f"{names}: {error}") from None

    def __call__(self, x: Tensor, other: Tensor | None = None) -> Tensor:
        """x: [T, in]; other: what the epilogue ``add`` adds, [T, out]."""
        return self.apply(x, other)


def rounded(weight: Weight, rounding: Rounding, versions: LinearVersions) -> Weight:
    """What the checkpoint has rounded already stays as it is."""
    return rounding.round(weight, versions) if isinstance(weight, Tensor) else weight
