"""A few rows (2 to 64) times a weight matrix, on tensor cores.

Reading the weights once at full bandwidth is all that counts. The weights are the 64-row operand
of the tensor cores and x, padded to 16, 32 or 64 rows, the narrow one ("swap"), or the other way
round; where the output has few tiles the sum over k is split, and the program that arrives last
adds the parts in a fixed order, so the result never depends on timing.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from octavo.ops.triton.launch import options
from octavo.ops.triton.plans import Plan


@triton.jit(do_not_specialize=["m", "k_by_8", "steps"])
def skinny_kernel(
    x_ptr, w_ptr, bias_ptr, other_ptr, y_ptr, parts_ptr, arrived_ptr, m, n, k_by_8, steps,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    SPLIT_K: tl.constexpr, SWAP: tl.constexpr, EVEN_K: tl.constexpr,
    BIAS: tl.constexpr, ADD: tl.constexpr, SILU: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """y[m, n] = x[m, k] @ w[n, k].T; a program takes BLOCK_N rows of w and ``steps`` blocks of k.

    With SILU, w has 2n rows, and a tile is BLOCK_N / 2 of the gate's and the up projection's of the
    same outputs.
    """
    if PDL == 1:
        gdc_launch_dependents()
    OUTPUTS: tl.constexpr = BLOCK_N // 2 if SILU else BLOCK_N
    tile, split = tl.program_id(0), tl.program_id(1)
    k = k_by_8 * 8  # so known to be a multiple of 8: loads of 16 bytes
    local = tl.arange(0, BLOCK_N)
    w_rows = tl.minimum(tile * OUTPUTS + local % OUTPUTS, n - 1)  # so that loads need no mask
    if SILU:
        w_rows += local // OUTPUTS * n
    outputs = tile * OUTPUTS + tl.arange(0, OUTPUTS)
    rows = tl.arange(0, BLOCK_M)
    places = rows[:, None] * n + outputs[None, :]
    stored = (rows < m)[:, None] & (outputs < n)[None, :]
    columns = tl.arange(0, BLOCK_K)
    start = split * steps * BLOCK_K
    w_tiles = w_ptr + w_rows[:, None].to(tl.int64) * k + columns[None, :]
    x_tiles = x_ptr + rows[:, None] * k + columns[None, :]
    x_rows = (rows < m)[:, None]
    if BIAS:
        bias = tl.load(bias_ptr + w_rows).to(tl.float32)
    if PDL != 0:
        gdc_wait()
    if ADD and SPLIT_K == 1:
        other = tl.load(other_ptr + places, mask=stored, other=0.0)

    if SWAP:
        acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    else:
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for at in tl.range(start, tl.minimum(start + steps * BLOCK_K, k), BLOCK_K):
        if EVEN_K:
            x = tl.load(x_tiles + at, mask=x_rows, other=0.0)
            w = tl.load(w_tiles + at)
        else:
            left = columns[None, :] < k - at
            x = tl.load(x_tiles + at, mask=x_rows & left, other=0.0)
            w = tl.load(w_tiles + at, mask=left, other=0.0)
        if SWAP:
            acc = tl.dot(w, tl.trans(x), acc)
        else:
            acc = tl.dot(x, tl.trans(w), acc)
    if PDL == 2:
        gdc_launch_dependents()
    if not SWAP:
        acc = tl.trans(acc)

    last = True
    if SPLIT_K > 1:
        SIZE: tl.constexpr = BLOCK_N * BLOCK_M
        inner = local[:, None] * BLOCK_M + rows[None, :]
        parts = parts_ptr + tile.to(tl.int64) * (SPLIT_K * SIZE) + inner
        tl.store(parts + split * SIZE, acc)
        tl.debug_barrier()  # all of this program's stores, before it says it has arrived
        arrived = tl.atomic_add(arrived_ptr + tile, 1, sem="acq_rel", scope="gpu")
        last = arrived == SPLIT_K - 1
        if last:
            acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
            for i in tl.static_range(SPLIT_K):
                acc += tl.load(parts + i * SIZE, cache_modifier=".cg")
            tl.store(arrived_ptr + tile, 0)
    if last:
        if BIAS:
            acc += bias[:, None]
        if SILU:
            pairs = tl.permute(tl.reshape(acc, (2, OUTPUTS, BLOCK_M)), (1, 2, 0))
            gate, up = tl.split(pairs)
            y = tl.trans(gate / (1.0 + tl.exp(-gate)) * up)
        else:
            y = tl.trans(acc)
        if ADD:
            if SPLIT_K > 1:
                other = tl.load(other_ptr + places, mask=stored, other=0.0)
            y += other.to(tl.float32)
        tl.store(y_ptr + places, y.to(y_ptr.dtype.element_ty), mask=stored)


def tiles(plan: Plan, n: int, silu: bool) -> int:
    """Programs along n; ``n``: columns of the output."""
    return -(-n // (plan.block_n // 2 if silu else plan.block_n))


def skinny(
    plan: Plan, bucket: int, x: Tensor, weight: Tensor, bias: Tensor | None, other: Tensor | None,
    y: Tensor, arrived: Tensor, silu: bool, pdl: int,
) -> None:  # fmt: skip
    """x: [M, K], M up to ``bucket`` (16, 32, 64), K a multiple of 8; weight: [N, K]; other, y:
    [M, N], or [M, N / 2] with ``silu``. arrived: int32 zeros, one per tile; zeros again after."""
    (rows, n), k = y.shape, weight.shape[1]
    count = tiles(plan, n, silu)
    blocks = triton.cdiv(k, plan.block_k)
    steps = triton.cdiv(blocks, plan.split_k)
    splits = triton.cdiv(blocks, steps)  # none of them is empty
    parts = y
    if splits > 1:
        size = count * splits * plan.block_n * bucket
        parts = torch.empty(size, dtype=torch.float32, device=y.device)
    skinny_kernel[(count, splits)](
        x, weight, weight if bias is None else bias, x if other is None else other, y, parts,
        arrived, rows, n, k // 8, steps,
        BLOCK_M=bucket, BLOCK_N=plan.block_n, BLOCK_K=plan.block_k,
        SPLIT_K=splits, SWAP=plan.swap, EVEN_K=k % plan.block_k == 0,
        BIAS=bias is not None, ADD=other is not None, SILU=silu, PDL=pdl,
        **options(plan.num_warps, pdl, plan.num_stages),
    )  # fmt: skip
