"""What a quantization format tells the rest of the engine. Never imports torch at module level.

A format declares the tensors it stores for one linear by logical axis and packing; loading, fusion
of q/k/v and gate/up, tensor-parallel slicing and memory planning follow from the declaration.
``finish`` repacks once for the kernel and returns what multiplies.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    import torch

Axis = Literal["out", "in"]


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a linear. ``axes``: (logical axis, how many of its elements one stored element
    spans), e.g. a 128-block scale: (("out", 128), ("in", 128))."""

    suffix: str
    axes: tuple[tuple[Axis, int], ...]

    def shape(self, out_features: int, in_features: int) -> tuple[int, ...]:
        sizes = {"out": out_features, "in": in_features}
        return tuple(-(-sizes[axis] // span) for axis, span in self.axes)


_WEIGHT = StoredTensor("weight", (("out", 1), ("in", 1)))
_BIAS = StoredTensor("bias", (("out", 1),))


@dataclass(frozen=True)
class LinearVersions:
    """The chosen versions of the linear operations (octavo.ops), and the dtype they compute in."""

    dense: Callable[..., Any]
    quantized: Callable[..., Any]
    quantize: Callable[..., Any]
    dtype: torch.dtype


class Format(Protocol):
    name: str

    def tensors(self, bias: bool) -> tuple[StoredTensor, ...]:
        """What the checkpoint holds for one linear."""

    def finish(
        self,
        parts: Sequence[Mapping[str, Any]],
        epilogue: str,
        versions: LinearVersions,
    ) -> Callable[..., torch.Tensor]:
        """``parts``: the tensors (by suffix) of each projection fused into this linear, in order;
        a weight may be a ``QuantizedWeight`` where the checkpoint holds it so."""


def weight_and_bias(bias: bool) -> tuple[StoredTensor, ...]:
    """What a checkpoint of whole weights holds for one linear."""
    return (_WEIGHT, _BIAS) if bias else (_WEIGHT,)


def joined_bias(parts: Sequence[Mapping[str, Any]]) -> torch.Tensor | None:
    """The biases of fused projections, one after the other."""
    import torch

    biases = [part["bias"] for part in parts if "bias" in part]
    return torch.cat(biases) if biases else None
