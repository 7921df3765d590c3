"""Linear layers of a decoder: which checkpoint tensors they need, and how they multiply."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from torch import Tensor

from octavo.ops.linear import Epilogue
from octavo.ops.weights import QuantizedWeight
from octavo.quant.format import Format, LinearVersions

# What a checkpoint holds of a matrix.
Weight = Tensor | QuantizedWeight


@dataclass
class Linear:
    """One or several projections of the same input, fused by concatenation.

    ``parts``: (our parameter name, out_features). ``versions``: the chosen ones of the linear
    operations. Call it after ``load``.
    """

    parts: tuple[tuple[str, int], ...]
    in_features: int
    format: Format
    versions: LinearVersions
    bias: bool = False
    epilogue: Epilogue = "none"
    apply: Callable[..., Tensor] = field(init=False)

    def wanted(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """(our tensor name, stored shape) of everything the checkpoint must hold."""
        for name, out_features in self.parts:
            for tensor in self.format.tensors(self.bias):
                yield f"{name}.{tensor.suffix}", tensor.shape(out_features, self.in_features)

    def load(self, tensors: Mapping[str, Weight]) -> None:
        """tensors: ours by name, in the model's dtype or quantized. They may be released
        afterwards."""
        suffixes = [tensor.suffix for tensor in self.format.tensors(self.bias)]
        parts = [{s: tensors[f"{name}.{s}"] for s in suffixes} for name, _ in self.parts]
        self.apply = self.format.finish(parts, self.epilogue, self.versions)

    def __call__(self, x: Tensor, other: Tensor | None = None) -> Tensor:
        """x: [T, in]; other: what the epilogue ``add`` adds, [T, out]."""
        return self.apply(x, other)
