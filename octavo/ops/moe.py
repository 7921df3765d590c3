"""Mixture of experts: which experts a token goes to, and the experts themselves.

The experts are made once from their weights and called many times, as linears are:
``version.call(gate_up, down, activation, ...)`` gives ``apply(x, ids, weights, other=None)``. Their
weights come as one tensor, or as a list of each one's, of any kind (ops/weights.py), which a
version may empty as it packs them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.ops.linear import Apply, silu_mul
from octavo.ops.registry import register
from octavo.ops.routing import Routing
from octavo.ops.weights import dense

Activation = Literal["silu_mul", "swiglu_clamped"]
ApplyExperts = Callable[..., Tensor]
OfExperts = Tensor | list[Any]  # a Weight of each
# (weights, bias, epilogue) -> apply, as ``linear`` but of weights of any kind.
MakeLinear = Callable[..., Apply]
SWIGLU_ALPHA = 1.702
SWIGLU_LIMIT = 7.0


@register("moe_route", "torch")
def route(
    logits: Tensor, routing: Routing, correction: Tensor | None = None, slots: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """logits: [T, E]. Expert ids, int32 [T, k], best first, and their weights, FP32 [T, k].

    correction: [E], added to the scores for the choice alone, not for the weights. Of equal scores
    the lower id is chosen. slots: int64 [T]; tokens with a negative one are padding: their ids are
    -1 and their weights 0. Scores are FP32, or FP64 for logits in FP64.
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    scores = logits.softmax(-1) if routing.score == "softmax" else logits.sigmoid()
    choice = scores if correction is None else scores + correction.to(scores.dtype)
    if routing.groups > 1:
        grouped = choice.unflatten(-1, (routing.groups, -1))
        worth = grouped.topk(2 if routing.group_score == "top2" else 1).values.sum(-1)
        kept = _best(worth, routing.groups_kept)
        dropped = torch.ones_like(worth, dtype=torch.bool).scatter_(-1, kept, False)
        choice = grouped.masked_fill(dropped[..., None], -torch.inf).flatten(-2)
    ids = _best(choice, routing.top_k)
    weights = scores.gather(-1, ids)
    if routing.renormalize:
        weights = weights / weights.sum(-1, keepdim=True).clamp_min(1e-20)
    weights, ids = (weights * routing.scale).float(), ids.int()
    if slots is not None:
        padding = slots[:, None] < 0
        weights, ids = weights.masked_fill(padding, 0.0), ids.masked_fill(padding, -1)
    return ids, weights


def _best(values: Tensor, count: int) -> Tensor:
    """Places of the largest, best first; of equals the first."""
    return values.sort(dim=-1, descending=True, stable=True).indices[..., :count]


@register("moe_experts", "torch")
def experts(
    gate_up: OfExperts,
    down: OfExperts,
    activation: Activation = "silu_mul",
    gate_up_bias: OfExperts | None = None,
    down_bias: OfExperts | None = None,
    linear: MakeLinear | None = None,
) -> ApplyExperts:
    """y = sum over k of weight_k * down_k(activation(gate_k(x), up_k(x))), then + other.

    gate_up: [E, 2m, h], each expert's gate projection, then its up projection; down: [E, h, m];
    their biases: [E, 2m] and [E, h]. x: [T, h]; ids: int32 [T, k], -1 for none; weights: FP32
    [T, k]; other: [T, h], which a version may write its result over. y: [T, h], zeros (or other)
    for a token without experts. linear: what a version makes linears of quantized weights by, if it
    has no kernels of its own for them; the definition expands them at each call. Raises ValueError
    for weights that do not belong together.
    """
    check_shapes(gate_up, down, gate_up_bias, down_bias)
    activate = silu_mul if activation == "silu_mul" else swiglu_clamped

    def apply(x: Tensor, ids: Tensor, weights: Tensor, other: Tensor | None = None) -> Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        y = torch.zeros_like(x, dtype=wide)
        for expert in ids.unique().tolist():
            if expert < 0:
                continue
            tokens, places = (ids == expert).nonzero(as_tuple=True)
            up_bias = None if gate_up_bias is None else gate_up_bias[expert]
            bias = None if down_bias is None else down_bias[expert]
            inner = activate(F.linear(x[tokens], dense(gate_up[expert], x.dtype), up_bias))
            part = F.linear(inner, dense(down[expert], x.dtype), bias).to(wide)
            y.index_add_(0, tokens, part * weights[tokens, places, None])
        return (y if other is None else y + other).to(x.dtype)

    return apply


def check_shapes(
    gate_up: OfExperts,
    down: OfExperts,
    gate_up_bias: OfExperts | None,
    down_bias: OfExperts | None,
) -> tuple[int, int, int]:
    """The number of experts, and their outer and inner width. Raises ValueError with the shapes
    where they do not fit together."""
    count, hidden, inner = shape_of(down)
    wanted = {
        "gate_up": (gate_up, (count, 2 * inner, hidden)),
        "gate_up_bias": (gate_up_bias, (count, 2 * inner)),
        "down_bias": (down_bias, (count, hidden)),
    }
    for name, (tensor, shape) in wanted.items():
        if tensor is not None and shape_of(tensor) != shape:
            raise ValueError(
                f"{name} is {list(shape_of(tensor))}, but down {[count, hidden, inner]} asks for "
                f"{list(shape)}"
            )
    return count, hidden, inner


def shape_of(weights: OfExperts) -> tuple[int, ...]:
    """As if they were one tensor. Raises ValueError where a list's differ."""
    if isinstance(weights, Tensor):
        return tuple(weights.shape)
    shapes = {tuple(weight.shape) for weight in weights}
    if len(shapes) != 1:
        raise ValueError(f"experts of different shapes: {sorted(shapes)}")
    return (len(weights), *shapes.pop())


def swiglu_clamped(x: Tensor) -> Tensor:
    """[T, 2m] -> [T, m]: gpt-oss's (up + 1) * gate * sigmoid(1.702 gate), where gate is at most 7
    and up within -7 .. 7."""
    gate, up = x.chunk(2, dim=-1)
    gate = gate.clamp(max=SWIGLU_LIMIT)
    up = up.clamp(-SWIGLU_LIMIT, SWIGLU_LIMIT)
    return (up + 1) * gate * torch.sigmoid(SWIGLU_ALPHA * gate)
