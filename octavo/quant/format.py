"""What a quantization format tells the rest of the engine. Never imports torch at module level.

A checkpoint's format declares the tensors it stores for one projection by logical axis and
packing; checks before memory is taken, loading and tensor-parallel slicing follow from the
declaration. ``read`` turns them into one of the kinds of weights that the kernels know
(``ops.weights``), exactly.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from math import ceil
from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    from octavo.ops.weights import Quantized

# "one" is an axis of length 1; the length of a "free" one says something only the file knows.
Axis = Literal["out", "in", "one", "free"]
Axes = tuple[tuple[Axis, int | Fraction], ...]
FLOATS = ("F32", "BF16", "F16")


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a projection. ``axes``: (logical axis, how many of its elements one stored
    element spans), e.g. a 128-block scale: (("out", 128), ("in", 128)), or codes of 3 bits in
    int32: (("in", Fraction(32, 3)), ("out", 1)); a span of 0: all of them. ``also``: other axes it
    may have. ``kinds``: its types, in safetensors' names. ``optional``: it may be absent."""

    suffix: str
    axes: Axes
    also: tuple[Axes, ...] = ()
    kinds: tuple[str, ...] = FLOATS
    optional: bool = False

    def shape(self, out_features: int, in_features: int) -> tuple[int, ...]:
        return _sizes(self.axes, out_features, in_features)

    def shapes(self, out_features: int, in_features: int) -> tuple[tuple[int, ...], ...]:
        """All that are allowed; -1 is any number."""
        axes = (self.axes, *self.also)
        return tuple(_sizes(one, out_features, in_features) for one in axes)


def _sizes(axes: Axes, out_features: int, in_features: int) -> tuple[int, ...]:
    sizes = {"out": out_features, "in": in_features, "one": 1}
    return tuple(
        -1 if axis == "free" else ceil(Fraction(sizes[axis]) / span) if span else 1
        for axis, span in axes
    )


class CheckpointFormat(Protocol):
    """How a checkpoint keeps the weight of one projection, without its bias."""

    name: str

    def tensors(self) -> tuple[StoredTensor, ...]:
        """What is stored, the main one first: a projection without it is not quantized."""

    def check(self, out_features: int, in_features: int) -> None:
        """Raises ValueError, in a clause with the numbers, for a matrix that the format cannot
        hold."""

    def read(self, tensors: Mapping[str, Any], out_features: int, in_features: int) -> Quantized:
        """``tensors``: by suffix, as stored, on any one device; the weight is on the same. Raises
        ValueError, in a clause, for contents that mean nothing."""

    def bytes_of(self, out_features: int, in_features: int) -> int:
        """What the weight takes once it is packed for multiplying."""
