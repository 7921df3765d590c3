"""A token's experts chosen by one program, which holds all scores in registers."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from octavo.ops.registry import register
from octavo.ops.routing import Routing
from octavo.ops.triton.launch import EARLY, OFF, available, next_power_of_2, options, pdl_for


@triton.jit
def _best(values, axis: tl.constexpr):
    """Largest along the axis and its place; of equals the first."""
    return tl.max(values, axis, return_indices=True, return_indices_tie_break_left=True)


@triton.jit
def route_kernel(
    logits_ptr, correction_ptr, slots_ptr, ids_ptr, weights_ptr, scale,
    TOP_K: tl.constexpr, SIGMOID: tl.constexpr, RENORMALIZE: tl.constexpr,
    GROUPS: tl.constexpr, SIZE: tl.constexpr, KEPT: tl.constexpr, TOP2: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_K: tl.constexpr,
    CORRECTED: tl.constexpr, PADDED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """SIZE experts in each of GROUPS, of which the KEPT best count; BLOCK_*: powers of two."""
    if PDL != 0:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    groups, members = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_S)
    inside = (groups < GROUPS)[:, None] & (members < SIZE)[None, :]
    experts = groups[:, None] * SIZE + members[None, :]
    at = token * (GROUPS * SIZE) + experts
    logits = tl.load(logits_ptr + at, mask=inside, other=float("-inf")).to(tl.float32)
    if SIGMOID:
        scores = 1.0 / (1.0 + tl.exp(-logits))
    else:
        powers = tl.exp(logits - tl.max(tl.max(logits, 1), 0))
        scores = powers / tl.sum(tl.sum(powers, 1), 0)
    choice = scores
    if CORRECTED:
        choice += tl.load(correction_ptr + experts, mask=inside, other=0.0).to(tl.float32)
    choice = tl.where(inside, choice, float("-inf"))
    if KEPT < GROUPS:
        worth, first = _best(choice, 1)
        if TOP2:
            others = tl.where(members[None, :] == first[:, None], float("-inf"), choice)
            worth += tl.max(others, 1)
        kept = groups < 0
        for _ in tl.static_range(KEPT):
            _, group = _best(tl.where(kept, float("-inf"), worth), 0)
            kept = kept | (groups == group)
        choice = tl.where(kept[:, None], choice, float("-inf"))

    SPREAD: tl.constexpr = BLOCK_G * BLOCK_S
    choice, scores = tl.reshape(choice, (SPREAD,)), tl.reshape(scores, (SPREAD,))
    spread, slots = tl.arange(0, SPREAD), tl.arange(0, BLOCK_K)
    ids = tl.full((BLOCK_K,), -1, tl.int32)
    weights = tl.zeros((BLOCK_K,), tl.float32)
    for slot in tl.static_range(TOP_K):
        _, best = _best(choice, 0)
        score = tl.sum(tl.where(spread == best, scores, 0.0), 0)
        ids = tl.where(slots == slot, best // BLOCK_S * SIZE + best % BLOCK_S, ids)
        weights = tl.where(slots == slot, score, weights)
        choice = tl.where(spread == best, float("-inf"), choice)
    if RENORMALIZE:
        weights /= tl.maximum(tl.sum(weights, 0), 1e-20)
    weights *= scale
    if PADDED:
        live = tl.load(slots_ptr + token) >= 0
        ids = tl.where(live, ids, -1)
        weights = tl.where(live, weights, 0.0)
    tl.store(ids_ptr + token * TOP_K + slots, ids, mask=slots < TOP_K)
    tl.store(weights_ptr + token * TOP_K + slots, weights, mask=slots < TOP_K)


@register("moe_route", "triton", available)
def route(
    logits: Tensor, routing: Routing, correction: Tensor | None = None, slots: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """logits: [T, E], any float. Where scores differ by less than FP32 tells apart, another expert
    than the definition's may be chosen."""
    tokens = len(logits)
    logits = logits.contiguous()
    ids = torch.empty(tokens, routing.top_k, dtype=torch.int32, device=logits.device)
    weights = torch.empty(tokens, routing.top_k, dtype=torch.float32, device=logits.device)
    if not tokens:
        return ids, weights
    pdl = EARLY if pdl_for(tokens) else OFF
    size = routing.num_experts // routing.groups
    route_kernel[(tokens,)](
        logits, logits if correction is None else correction, logits if slots is None else slots,
        ids, weights, float(routing.scale),
        TOP_K=routing.top_k, SIGMOID=routing.score == "sigmoid", RENORMALIZE=routing.renormalize,
        GROUPS=routing.groups, SIZE=size, KEPT=routing.groups_kept,
        TOP2=routing.group_score == "top2", BLOCK_G=next_power_of_2(routing.groups),
        BLOCK_S=next_power_of_2(size), BLOCK_K=next_power_of_2(routing.top_k),
        CORRECTED=correction is not None, PADDED=slots is not None, PDL=pdl, **options(1, pdl),
    )  # fmt: skip
    return ids, weights
