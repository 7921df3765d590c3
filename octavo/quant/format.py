"""What a quantization format tells the rest of the engine. Never imports torch at module level.

A checkpoint's format declares the tensors it stores for one projection by logical axis and packing;
checks before memory is taken, loading and tensor-parallel slicing follow from the declaration.
``read`` turns them, exactly, into one of the kinds of weights that kernels know (``ops.weights``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from math import ceil
from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    from octavo.ops.weights import Quantized

# "both" are all values of the matrix in a row; "one" is an axis of length 1; the length of a "free"
# one says something only the file knows.
Axis = Literal["out", "in", "both", "one", "free"]
Axes = tuple[tuple[Axis, int | Fraction], ...]
FLOATS = ("F32", "BF16", "F16")


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a projection. ``axes``: (logical axis, how many of its elements one stored
    element spans), e.g. a 128-block scale: (("out", 128), ("in", 128)), or codes of 3 bits in words
    of 32: (("in", Fraction(32, 3)), ("out", 1)); a span of 0: all of them. ``also``: other axes it
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
    sizes = {"out": out_features, "in": in_features, "both": out_features * in_features, "one": 1}
    return tuple(
        -1 if axis == "free" else ceil(Fraction(sizes[axis]) / span) if span else 1
        for axis, span in axes
    )


def numbers(
    suffix: str,
    *others: Axes,
    kinds: tuple[str, ...] = FLOATS,
    optional: bool = False,
) -> StoredTensor:
    """A tensor of one number or a few, which ``read`` counts, in the ways that files have them, or
    of ``others``, the first of which is the usual one."""
    few: tuple[Axes, ...] = ((("free", 1),), (), (("one", 1), ("one", 1)))
    first, *also = (*others, *few)
    return StoredTensor(suffix, first, tuple(also), kinds, optional)


class CheckpointFormat(Protocol):
    """How a checkpoint keeps the weight of one projection, without its bias."""

    @property
    def name(self) -> str: ...

    def tensors(self) -> tuple[StoredTensor, ...]:
        """What is stored. The first tells that a projection is quantized: one without it, but with
        a ``weight``, is dense."""

    def check(self, out_features: int, in_features: int) -> None:
        """Raises ValueError, in a clause with the numbers, for a matrix that the format cannot
        hold."""

    def read(
        self,
        tensors: Mapping[str, Any],
        out_features: int,
        in_features: int,
        parts: Sequence[int] = (),
    ) -> Quantized:
        """``tensors``: by suffix, as stored and of declared shapes, on any one device; the weight
        is on the same. ``parts``: the outputs of each projection that the stored tensors hold one
        after the other, in order (Phi-3's ``qkv_proj``); () stands for a single one. Raises
        ValueError, in a clause, for contents that mean nothing."""

    def bytes_of(self, out_features: int, in_features: int) -> int:
        """What the weight takes once it is packed for multiplying."""


@dataclass(frozen=True)
class Scheme:
    """What a checkpoint's ``quantization_config`` says of its projections.

    name: as in ``--quantization``. format_of: the format of the projection whose stored tensors
    begin with a name (``model.layers.0.self_attn.q_proj``), None for a dense one. One that lacks
    its format's first tensor while it has a ``weight`` is dense all the same. spare_suffixes: of
    tensors that may stand beside a projection and mean nothing where the model has no such
    parameter and they are zero (AutoGPTQ's biases). notes: what was found odd while reading, and
    how it was taken; to be said once all is read.
    """

    name: str
    format_of: Callable[[str], CheckpointFormat | None]
    spare_suffixes: tuple[str, ...] = ()
    notes: dict[str, None] = field(default_factory=dict)
