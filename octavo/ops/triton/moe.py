"""Mixture of experts on a GPU: GEMVs for a few pairs, tiles of pairs sorted by expert beyond.

What depends on the routing stays on the device, so that a captured step serves any routing: grids
and buffers are upper bounds by the numbers of tokens, experts and choices.
"""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.ops.moe import Activation, ApplyExperts, MakeLinear, OfExperts, check_shapes
from octavo.ops.registry import register
from octavo.ops.triton.launch import available, has_wgmma, pdl_for
from octavo.ops.triton.moe_grouped import grouped, sum_of_pairs
from octavo.ops.triton.moe_packed import PackedExperts
from octavo.ops.triton.moe_pairs import pair_down, pair_up
from octavo.ops.triton.moe_plans import GroupedPlan, PairPlan, Plans, choose
from octavo.ops.triton.moe_sort import sort_by_expert


def _together(weights: OfExperts) -> Tensor:
    return weights.contiguous() if isinstance(weights, Tensor) else torch.stack(weights)


class TritonExperts:
    """``plans``: what is used instead of ``moe_plans.choose``'s, for tuning and tests."""

    def __init__(
        self,
        gate_up: OfExperts,
        down: OfExperts,
        activation: Activation = "silu_mul",
        gate_up_bias: OfExperts | None = None,
        down_bias: OfExperts | None = None,
    ) -> None:
        """Contiguous tensors are used as they are, lists are copied into one. Raises ValueError for
        weights that do not belong together, and for more than 2^31 elements of an expert."""
        sizes = check_shapes(gate_up, down, gate_up_bias, down_bias)
        if gate_up[0].numel() >= 1 << 31:
            raise ValueError(f"an expert of {gate_up[0].numel()} weights: at most 2^31 - 1 go")
        self.gate_up, self.down = _together(gate_up), _together(down)
        self.gate_up_bias = None if gate_up_bias is None else _together(gate_up_bias)
        self.down_bias = None if down_bias is None else _together(down_bias)
        self.clamped = activation == "swiglu_clamped"
        self.num_experts, self.hidden, self.inner = sizes
        self.plans: Plans | None = None

    def choose(self, tokens: int, top_k: int) -> Plans:
        sizes = (self.hidden, self.inner)
        return self.plans or choose(tokens, top_k, self.num_experts, sizes, has_wgmma())

    def __call__(
        self, x: Tensor, ids: Tensor, weights: Tensor, other: Tensor | None = None
    ) -> Tensor:
        """x, other: [T, h]; ids: int32, weights: FP32, both [T, k]."""
        tokens, top_k = ids.shape
        y = torch.empty(tokens, self.hidden, dtype=x.dtype, device=x.device)
        if not tokens:
            return y
        x, ids, weights = x.contiguous(), ids.contiguous(), weights.contiguous()
        other = None if other is None else other.contiguous()
        inner = torch.empty(tokens * top_k, self.inner, dtype=x.dtype, device=x.device)
        plans, pdl = self.choose(tokens, top_k), pdl_for(tokens)
        if isinstance(plans.up, PairPlan) and isinstance(plans.down, PairPlan):
            pair_up(plans.up, x, self.gate_up, self.gate_up_bias, ids, inner, self.clamped, pdl)
            operands = (inner, self.down, self.down_bias, ids, weights, other)
            pair_down(plans.down, *operands, y, pdl)
            return y
        assert isinstance(plans.up, GroupedPlan) and isinstance(plans.down, GroupedPlan)
        pairs = sort_by_expert(ids, self.num_experts, plans.up.block_m, pdl)
        up = (x, self.gate_up, self.gate_up_bias, inner, pairs, pdl)
        grouped(plans.up, *up, clamped=self.clamped)
        parts = torch.empty(tokens * top_k, self.hidden, dtype=x.dtype, device=x.device)
        grouped(plans.down, inner, self.down, self.down_bias, parts, pairs, pdl, weights)
        sum_of_pairs(parts, ids, other, y, pdl)
        return y


@register("moe_experts", "triton", available)
def experts(
    gate_up: OfExperts,
    down: OfExperts,
    activation: Activation = "silu_mul",
    gate_up_bias: OfExperts | None = None,
    down_bias: OfExperts | None = None,
    linear: MakeLinear | None = None,
) -> ApplyExperts:
    """As the definition. Lists of quantized weights, of one kind for all experts, are packed one by
    one and empty afterwards; there are kernels for them, so ``linear`` is not called."""
    arguments = (gate_up, down, activation, gate_up_bias, down_bias)
    if _quantized(gate_up) != _quantized(down):
        raise ValueError("gate and up projections are quantized and down projections not, or so")
    return PackedExperts(*arguments) if _quantized(down) else TritonExperts(*arguments)


def _quantized(weights: OfExperts) -> bool:
    """Raises ValueError where only some are."""
    if isinstance(weights, Tensor):
        return False
    kinds = {isinstance(weight, Tensor) for weight in weights}
    if len(kinds) != 1:
        raise ValueError("some experts are quantized, others not")
    return not kinds.pop()
