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


class Format(Protocol):
    name: str

    def tensors(self, bias: bool) -> tuple[StoredTensor, ...]:
        """What the checkpoint holds for one linear."""

    def finish(
        self,
        parts: Sequence[Mapping[str, torch.Tensor]],
        epilogue: str,
        linear: Callable[..., Any],
    ) -> Callable[..., torch.Tensor]:
        """``parts``: the tensors (by suffix) of each projection fused into this linear, in order.
        ``linear``: the chosen version of the linear operation for this format."""
