"""Linear layers: definition, and the operations around them (embedding, SiLU·mul).

A linear is made once from its weight and called many times, so that a version may repack:
``version.call(weight, bias, epilogue)`` gives the callable ``apply(x, other=None)``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.ops.registry import register

Epilogue = Literal["none", "silu_mul", "add", "logits"]
Apply = Callable[..., Tensor]


@runtime_checkable
class TakesGates(Protocol):
    """What some versions' ``apply`` is besides: where SiLU·mul would be a pass of its own, it is
    left to the linear that comes after, which computes it while it rounds its inputs.

    ``takes_gates``: x may also be [T, 2 in]: SiLU·mul of it is multiplied.
    """

    @property
    def takes_gates(self) -> bool: ...

    def gates(self, x: Tensor) -> Tensor | None:
        """[T, 2m], y of ``silu_mul`` before the epilogue, which the caller may keep; None: the
        epilogue costs nothing for so many rows, and the caller is to call ``apply``."""
        ...


@register("linear", "torch")
def linear(weights: Sequence[Tensor], bias: Tensor | None, epilogue: Epilogue) -> Apply:
    """y = x @ cat(weights).T + bias, then the epilogue.

    weights: each [out_i, in]; x: [T, in]; bias: [sum out_i].
    ``none``: y. ``add``: y + other, other [T, out], which a version may write its result over; the
    others take none. ``silu_mul``: the weights
    are the gate's and the up projection's, of equal size; silu(y_gate) * y_up, [T, out / 2].
    ``logits``: y in FP32; a version may round its products to x's dtype, but not those close to a
    row's largest, which decide what is drawn.
    """
    weight = weights[0] if len(weights) == 1 else torch.cat(tuple(weights))

    def logits(x: Tensor, other: Tensor | None = None) -> Tensor:
        y = F.linear(x.float(), weight.float())
        return y if bias is None else y + bias.float()

    def apply(x: Tensor, other: Tensor | None = None) -> Tensor:
        y = F.linear(x, weight, bias)
        if other is not None:
            return y + other
        return silu_mul(y) if epilogue == "silu_mul" else y

    return logits if epilogue == "logits" else apply


def finished(
    y: Tensor, bias: Tensor | None, epilogue: Epilogue, other: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """What a definition makes of a product y, [T, sum out_i] in FP32 or FP64: the bias and the
    epilogue (see ``linear``), rounded to ``dtype`` once; ``logits`` are not."""
    if bias is not None:
        y = y + bias.to(y.dtype)
    if epilogue == "logits":
        return y
    if other is not None:
        return (y + other).to(dtype)
    return (silu_mul(y) if epilogue == "silu_mul" else y).to(dtype)


@register("embedding", "torch", batch_invariant="yes")
def embedding(ids: Tensor, weight: Tensor) -> Tensor:
    """Rows of the weight [V, H] for ids, int64 [T]: [T, H]. Every id is in 0 .. V - 1."""
    return F.embedding(ids, weight)


def silu_mul(x: Tensor) -> Tensor:
    """[T, 2m] -> [T, m]: silu(first half) * second half."""
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)
