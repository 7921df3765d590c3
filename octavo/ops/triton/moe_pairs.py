"""A few pairs of a token and an expert, each with its own expert's weights: GEMVs, nothing sorted.

As in ``gemv.py`` only the weights' bytes matter, so programs are small and there are no tensor
cores. The down projection of all a token's experts is one sum in one program: nothing is left to
add up.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from octavo.ops.triton.launch import options
from octavo.ops.triton.moe_grouped import activated
from octavo.ops.triton.moe_plans import PairPlan


@triton.jit
def pair_up_kernel(
    x_ptr, w_ptr, bias_ptr, ids_ptr, y_ptr,
    N: tl.constexpr, K: tl.constexpr, TOP_K: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    BIAS: tl.constexpr, CLAMPED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """y[pair, N] = activation(w[expert] @ x[token]); w: [E, 2N, K]. A pair without an expert is
    left out."""
    if PDL == 1:
        gdc_launch_dependents()
    if PDL != 0:
        gdc_wait()
    pair = tl.program_id(1)
    expert = tl.load(ids_ptr + pair)
    if expert < 0:
        return
    outputs = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = tl.minimum(outputs, N - 1)  # so that loads need no mask
    columns = tl.arange(0, BLOCK_K)
    x_row = x_ptr + pair // TOP_K * K + columns
    tiles = w_ptr + expert.to(tl.int64) * (2 * N * K) + rows[:, None] * K + columns[None, :]
    gate_acc = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    up_acc = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    for at in tl.static_range(0, K, BLOCK_K):
        if at + BLOCK_K <= K:
            gate_w = tl.load(tiles + at)
            up_w = tl.load(tiles + N * K + at)
            x = tl.load(x_row + at)
        else:
            left = columns < K - at
            gate_w = tl.load(tiles + at, mask=left[None, :], other=0.0)
            up_w = tl.load(tiles + N * K + at, mask=left[None, :], other=0.0)
            x = tl.load(x_row + at, mask=left, other=0.0)
        x = x.to(tl.float32)[None, :]
        gate_acc += gate_w.to(tl.float32) * x
        up_acc += up_w.to(tl.float32) * x
    if PDL == 2:
        gdc_launch_dependents()
    gate, up = tl.sum(gate_acc, 1), tl.sum(up_acc, 1)
    if BIAS:
        bias = bias_ptr + expert * (2 * N) + rows
        gate += tl.load(bias).to(tl.float32)
        up += tl.load(bias + N).to(tl.float32)
    y = activated(gate, up, CLAMPED).to(y_ptr.dtype.element_ty)
    tl.store(y_ptr + pair * N + outputs, y, mask=outputs < N)


@triton.jit
def pair_down_kernel(
    x_ptr, w_ptr, bias_ptr, ids_ptr, weights_ptr, other_ptr, y_ptr,
    N: tl.constexpr, K: tl.constexpr, TOP_K: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    BIAS: tl.constexpr, ADD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """y[token, N] = sum over its pairs of weight * (w[expert] @ x[pair] + bias), + other."""
    if PDL == 1:
        gdc_launch_dependents()
    if PDL != 0:
        gdc_wait()
    token = tl.program_id(1)
    outputs = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = tl.minimum(outputs, N - 1)
    columns = tl.arange(0, BLOCK_K)
    acc = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    biases = tl.zeros((BLOCK_N,), tl.float32)
    for slot in tl.static_range(TOP_K):
        pair = token * TOP_K + slot
        expert = tl.load(ids_ptr + pair)
        weight = tl.load(weights_ptr + pair)
        present = expert >= 0  # of one left out nothing is read
        tiles = w_ptr + expert.to(tl.int64) * (N * K) + rows[:, None] * K + columns[None, :]
        for at in tl.static_range(0, K, BLOCK_K):
            if at + BLOCK_K <= K:
                read = present & (columns >= 0)
            else:
                read = present & (columns < K - at)
            w = tl.load(tiles + at, mask=read[None, :], other=0.0)
            x = tl.load(x_ptr + pair * K + at + columns, mask=read, other=0.0)
            acc += w.to(tl.float32) * (x.to(tl.float32) * weight)[None, :]
        if BIAS:
            bias = tl.load(bias_ptr + expert * N + rows, mask=present & (rows >= 0), other=0.0)
            biases += bias.to(tl.float32) * weight
    if PDL == 2:
        gdc_launch_dependents()
    y = tl.sum(acc, 1) + biases
    if ADD:
        y += tl.load(other_ptr + token * N + rows).to(tl.float32)
    tl.store(y_ptr + token * N + outputs, y.to(y_ptr.dtype.element_ty), mask=outputs < N)


def pair_up(
    plan: PairPlan, x: Tensor, weight: Tensor, bias: Tensor | None, ids: Tensor, y: Tensor,
    clamped: bool, pdl: int,
) -> None:  # fmt: skip
    """x: [T, K]; weight: [E, 2N, K]; ids: [T, k]; y: [T * k, N]."""
    pairs, n = y.shape
    pair_up_kernel[(triton.cdiv(n, plan.block_n), pairs)](
        x, weight, weight if bias is None else bias, ids, y,
        N=n, K=weight.shape[2], TOP_K=ids.shape[1], BLOCK_N=plan.block_n, BLOCK_K=plan.block_k,
        BIAS=bias is not None, CLAMPED=clamped, PDL=pdl, **options(plan.num_warps, pdl),
    )  # fmt: skip


def pair_down(
    plan: PairPlan, x: Tensor, weight: Tensor, bias: Tensor | None, ids: Tensor, weights: Tensor,
    other: Tensor | None, y: Tensor, pdl: int,
) -> None:  # fmt: skip
    """x: [T * k, K]; weight: [E, N, K]; ids, weights: [T, k]; other, y: [T, N]."""
    tokens, n = y.shape
    pair_down_kernel[(triton.cdiv(n, plan.block_n), tokens)](
        x, weight, weight if bias is None else bias, ids, weights, y if other is None else other,
        y, N=n, K=weight.shape[2], TOP_K=ids.shape[1],
        BLOCK_N=plan.block_n, BLOCK_K=plan.block_k, BIAS=bias is not None, ADD=other is not None,
        PDL=pdl, **options(plan.num_warps, pdl),
    )  # fmt: skip
