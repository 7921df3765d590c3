"""Linears for ``--deterministic``: a row's result does not depend on its batch.

For any number of rows, and wherever a row stands among them, its outputs are made by one matrix
instruction (on Hopper 64 rows x 64 outputs x 16 of k), over k in ascending order, never split. How
many of them a program does at a time changes no bit, so that may depend on the number of rows.

The price: a row alone is multiplied as 64, its weights are read by no more programs than there are
tiles of 64 outputs, and for many rows the products are smaller than those of cuBLAS.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from octavo.ops.linear import Epilogue
from octavo.ops.registry import register
from octavo.ops.triton import launch
from octavo.ops.triton.plans import PROCESSORS

OUTPUTS = tl.constexpr(64)  # of one product
TOGETHER = tl.constexpr(8)  # tiles of rows that follow each other, for they read the same weights
BLOCK_K = 64
TILES_BYTES = 96 << 10  # in flight in a program: any GPU has room for them, Hopper for two


@triton.jit
def _weights(pointers, left, EVEN_K: tl.constexpr):
    """A tile of the weight, transposed; zeros where it ends, unless EVEN_K."""
    if EVEN_K:
        tile = tl.load(pointers)
    else:
        tile = tl.load(pointers, mask=left, other=0.0)
    return tl.trans(tile)


@triton.jit
def _store(y, y_ptr, other_ptr, rows, outputs, m, n, ADD: tl.constexpr):
    places = rows[:, None].to(tl.int64) * n + outputs[None, :]
    inside = (rows < m)[:, None] & (outputs < n)[None, :]
    if ADD:
        y += tl.load(other_ptr + places, mask=inside, other=0.0).to(tl.float32)
    tl.store(y_ptr + places, y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["m"])
def fixed_linear_kernel(
    x_ptr, w_ptr, bias_ptr, other_ptr, y_ptr, m, n, k_by_unit,
    BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, UNIT: tl.constexpr, PAIR: tl.constexpr,
    BIAS: tl.constexpr, ADD: tl.constexpr, SILU: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """y[m, n] = x[m, k] @ w[n, k].T, k a multiple of UNIT. A program takes BLOCK_M rows and OUTPUTS
    outputs, with PAIR two neighbouring tiles of them.

    With SILU, w has 2n rows, and the pair is the gate's and the up projection's tile of the same
    outputs.
    """
    if PDL == 1:
        gdc_launch_dependents()
    STEP: tl.constexpr = OUTPUTS * 2 if PAIR and not SILU else OUTPUTS
    program, across = tl.program_id(0), tl.cdiv(n, STEP)
    first = program // (across * TOGETHER) * TOGETHER
    high = tl.minimum(tl.cdiv(m, BLOCK_M) - first, TOGETHER)
    place = program % (across * TOGETHER)
    rows = (first + place % high) * BLOCK_M + tl.arange(0, BLOCK_M)
    outputs = place // high * STEP + tl.arange(0, OUTPUTS)
    w_rows = tl.minimum(outputs, n - 1)  # so that loads need no mask
    pair_rows = w_rows + n if SILU else tl.minimum(outputs + OUTPUTS, n - 1)
    EVEN_K: tl.constexpr = UNIT == BLOCK_K
    k = k_by_unit * UNIT  # so that loads are known to be aligned
    columns = tl.arange(0, BLOCK_K)
    x_tiles = x_ptr + rows[:, None].to(tl.int64) * k + columns[None, :]
    w_tiles = w_ptr + w_rows[:, None].to(tl.int64) * k + columns[None, :]
    pair_tiles = w_ptr + pair_rows[:, None].to(tl.int64) * k + columns[None, :]
    x_rows = (rows < m)[:, None]
    if PDL != 0:
        gdc_wait()

    y = tl.zeros((BLOCK_M, OUTPUTS), tl.float32)
    y_pair = tl.zeros((BLOCK_M, OUTPUTS), tl.float32)
    for at in tl.range(0, k, BLOCK_K):
        left = columns[None, :] < k - at
        x = tl.load(x_tiles + at, mask=x_rows if EVEN_K else x_rows & left, other=0.0)
        y = tl.dot(x, _weights(w_tiles + at, left, EVEN_K), y)
        if PAIR:
            y_pair = tl.dot(x, _weights(pair_tiles + at, left, EVEN_K), y_pair)
    if PDL == 2:
        gdc_launch_dependents()

    if BIAS:
        y += tl.load(bias_ptr + w_rows).to(tl.float32)[None, :]
        y_pair += tl.load(bias_ptr + pair_rows).to(tl.float32)[None, :]
    if SILU:
        y = y / (1.0 + tl.exp(-y)) * y_pair
    _store(y, y_ptr, other_ptr, rows, outputs, m, n, ADD)
    if PAIR and not SILU:
        _store(y_pair, y_ptr, other_ptr, rows, outputs + OUTPUTS, m, n, ADD)


def available(device: str, dtype: torch.dtype) -> bool:
    return launch.available(device, dtype) and launch.has_one_product()


@register("linear", "triton-fixed", available, batch_invariant="at a price")
class FixedLinear:
    def __init__(self, weights: Sequence[Tensor], bias: Tensor | None, epilogue: Epilogue) -> None:
        """A single contiguous weight is used as it is, several are copied into one."""
        self.weight = (weights[0] if len(weights) == 1 else torch.cat(tuple(weights))).contiguous()
        self.bias = bias
        self.epilogue = epilogue
        self.out_features = len(self.weight) // (2 if epilogue == "silu_mul" else 1)

    def __call__(self, x: Tensor, other: Tensor | None = None) -> Tensor:
        """x: [T, in]; other: [T, out], which ``add`` needs."""
        if (other is not None) != (self.epilogue == "add"):
            raise ValueError(f"epilogue {self.epilogue}: {'no' if other is None else 'an'} operand")
        (rows, k), n, silu = x.shape, self.out_features, self.epilogue == "silu_mul"
        dtype = torch.float32 if self.epilogue == "logits" else x.dtype
        y = torch.empty(rows, n, dtype=dtype, device=x.device)
        if not rows:
            return y
        block_m = 64 if rows <= 64 else 128
        row_tiles = triton.cdiv(rows, block_m)
        pair = silu or row_tiles * triton.cdiv(n, 2 * OUTPUTS.value) >= PROCESSORS
        columns = OUTPUTS.value * (2 if pair and not silu else 1)
        tiles = (block_m + OUTPUTS.value * (2 if pair else 1)) * BLOCK_K * x.element_size()
        unit, pdl = math.gcd(k, BLOCK_K), launch.pdl_for(rows)
        x = x.contiguous()
        fixed_linear_kernel[(row_tiles * triton.cdiv(n, columns),)](
            x, self.weight, x if self.bias is None else self.bias,
            x if other is None else other.contiguous(), y, rows, n, k // unit,
            BLOCK_M=block_m, BLOCK_K=BLOCK_K, UNIT=unit, PAIR=pair,
            BIAS=self.bias is not None, ADD=other is not None, SILU=silu, PDL=pdl,
            **launch.options(block_m // 16, pdl, TILES_BYTES // tiles),
        )  # fmt: skip
        return y
