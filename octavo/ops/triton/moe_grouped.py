"""Products of tiles of pairs with their experts' weights, on tensor cores; sums over a token's k.

Both products of an expert are one kernel: gate and up with the activation, down with the routing
weight. Results lie by pair, so that tiles leave no gaps in them and the sum over a token's experts
has one fixed order.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from octavo.ops.moe import SWIGLU_ALPHA, SWIGLU_LIMIT
from octavo.ops.triton.launch import options
from octavo.ops.triton.moe_plans import GroupedPlan
from octavo.ops.triton.moe_sort import Sorted

SUM_BLOCK = 1024
ALPHA, LIMIT = tl.constexpr(SWIGLU_ALPHA), tl.constexpr(SWIGLU_LIMIT)


@triton.jit
def activated(gate, up, CLAMPED: tl.constexpr):
    """silu(gate) * up, or gpt-oss's clamped SwiGLU; FP32."""
    if CLAMPED:
        gate = tl.minimum(gate, LIMIT)
        up = tl.minimum(tl.maximum(up, -LIMIT), LIMIT)
        y = (up + 1.0) * gate / (1.0 + tl.exp(-ALPHA * gate))
    else:
        y = gate / (1.0 + tl.exp(-gate)) * up
    return y


@triton.jit
def grouped_kernel(
    x_ptr, w_ptr, bias_ptr, weights_ptr, y_ptr, order_ptr, experts_ptr,
    N: tl.constexpr, K: tl.constexpr, SHARE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SWAP: tl.constexpr,
    BIAS: tl.constexpr, GATED: tl.constexpr, CLAMPED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """y[pair] = activation(x[pair // SHARE] @ w[expert].T) where GATED, else the product times the
    pair's routing weight. N: outputs. w: [E, N, K], or [E, 2N, K] where GATED.

    Of a GATED tile, rows 2i and 2i + 1 are the gate's and the up projection's of one output: then
    a thread holds both of them.
    """
    if PDL == 1:
        gdc_launch_dependents()
    if PDL != 0:
        gdc_wait()
    tile = tl.program_id(1)
    expert = tl.load(experts_ptr + tile)
    if expert < 0:
        return
    ROWS: tl.constexpr = 2 * N if GATED else N
    OUTPUTS: tl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N
    pairs = tl.load(order_ptr + tile * BLOCK_M + tl.arange(0, BLOCK_M))
    present = pairs >= 0
    local = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    if GATED:
        w_rows = tl.minimum(local // 2, N - 1) + local % 2 * N  # so that loads need no mask
    else:
        w_rows = tl.minimum(local, N - 1)
    columns = tl.arange(0, BLOCK_K)
    x_tiles = x_ptr + (pairs // SHARE).to(tl.int64)[:, None] * K + columns[None, :]
    w_tiles = w_ptr + expert.to(tl.int64) * (ROWS * K) + w_rows[:, None] * K + columns[None, :]

    if SWAP:
        acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    else:
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for at in tl.range(0, K, BLOCK_K):
        if K % BLOCK_K == 0:
            x = tl.load(x_tiles + at, mask=present[:, None], other=0.0)
            w = tl.load(w_tiles + at)
        else:
            left = columns[None, :] < K - at
            x = tl.load(x_tiles + at, mask=present[:, None] & left, other=0.0)
            w = tl.load(w_tiles + at, mask=left, other=0.0)
        if SWAP:
            acc = tl.dot(w, tl.trans(x), acc)
        else:
            acc = tl.dot(x, tl.trans(w), acc)
    if PDL == 2:
        gdc_launch_dependents()

    if SWAP:
        acc = tl.trans(acc)
    if BIAS:
        acc += tl.load(bias_ptr + expert * ROWS + w_rows).to(tl.float32)[None, :]
    if GATED:
        gate, up = tl.split(tl.reshape(acc, (BLOCK_M, OUTPUTS, 2)))
        y = activated(gate, up, CLAMPED)
    else:
        y = acc * tl.load(weights_ptr + pairs, mask=present, other=0.0)[:, None]
    outputs = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    stored = present[:, None] & (outputs < N)[None, :]
    places = pairs.to(tl.int64)[:, None] * N + outputs[None, :]
    tl.store(y_ptr + places, y.to(y_ptr.dtype.element_ty), mask=stored)


@triton.jit
def sum_kernel(
    parts_ptr, ids_ptr, other_ptr, y_ptr,
    N: tl.constexpr, TOP_K: tl.constexpr, BLOCK: tl.constexpr, ADD: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """y[token] = the sum of its pairs' parts, in their order, + other[token]."""
    if PDL != 0:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < N
    y = tl.zeros((BLOCK,), tl.float32)
    for slot in tl.static_range(TOP_K):
        pair = token * TOP_K + slot
        chosen = tl.load(ids_ptr + pair) >= 0
        y += tl.load(parts_ptr + pair * N + columns, mask=inside & chosen, other=0.0).to(tl.float32)
    if ADD:
        y += tl.load(other_ptr + token * N + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(y_ptr + token * N + columns, y.to(y_ptr.dtype.element_ty), mask=inside)


def grouped(
    plan: GroupedPlan, x: Tensor, weight: Tensor, bias: Tensor | None, y: Tensor, pairs: Sorted,
    pdl: int, weights: Tensor | None = None, clamped: bool = False,
) -> None:  # fmt: skip
    """x: [T, K] or [P, K]; weight: [E, N, K]; y: [P, N], or [P, N / 2] without ``weights`` (FP32,
    P of them), which is the gated product. Rows of y whose pair is left out are not written."""
    count, n = y.shape
    gated = weights is None
    outputs = plan.block_n // 2 if gated else plan.block_n
    grouped_kernel[(triton.cdiv(n, outputs), pairs.count)](
        x, weight, weight if bias is None else bias, x if weights is None else weights, y,
        pairs.order, pairs.experts, N=n, K=weight.shape[2], SHARE=count // len(x),
        BLOCK_M=plan.block_m, BLOCK_N=plan.block_n, BLOCK_K=plan.block_k, SWAP=plan.swap,
        BIAS=bias is not None, GATED=gated, CLAMPED=clamped, PDL=pdl,
        **options(plan.num_warps, pdl, plan.num_stages),
    )  # fmt: skip


def sum_of_pairs(parts: Tensor, ids: Tensor, other: Tensor | None, y: Tensor, pdl: int) -> None:
    """parts: [T * k, N]; ids: [T, k], -1 where a part counts nothing; other, y: [T, N]."""
    tokens, n = y.shape
    sum_kernel[(tokens, triton.cdiv(n, SUM_BLOCK))](
        parts, ids, y if other is None else other, y, N=n, TOP_K=ids.shape[1], BLOCK=SUM_BLOCK,
        ADD=other is not None, PDL=pdl, **options(4, pdl),
    )  # fmt: skip
