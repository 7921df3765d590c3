"""Experts of quantized weights on a GPU: tiles of pairs sorted by expert, decoded as they are read.

The weights of all experts are one packed tensor (``packed.py``); a tile of it is multiplied as that
of a linear is (``packed_skinny.py``). Few pairs are tiles of 16 too, most of them padding: reading
the weights is what counts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from octavo.ops.moe import Activation, OfExperts, check_shapes
from octavo.ops.triton.decode import words_of
from octavo.ops.triton.launch import has_wgmma, options, pdl_for
from octavo.ops.triton.moe_grouped import activated, sum_of_pairs
from octavo.ops.triton.moe_plans import tile_rows
from octavo.ops.triton.moe_sort import Sorted, sort_by_expert
from octavo.ops.triton.packed import Packed, pack
from octavo.ops.triton.packed_gemv import constants, operands
from octavo.ops.triton.packed_plans import PackedPlan, rows_of_tile
from octavo.ops.triton.packed_skinny import multiply, stages_that_fit, words_at_a_time


@triton.jit
def packed_grouped_kernel(
    x_ptr, w_ptr, scales_ptr, shifts_ptr, table_ptr, gather_ptr, bias_ptr, weights_ptr, y_ptr,
    order_ptr, experts_ptr,
    N: tl.constexpr, X_INPUTS: tl.constexpr, SHARE: tl.constexpr, GATHER: tl.constexpr,
    INPUTS: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr, BITS: tl.constexpr,
    GROUP: tl.constexpr, GROUPS: tl.constexpr, ROW_BLOCK: tl.constexpr, ZERO: tl.constexpr,
    SHIFT: tl.constexpr, TABLE: tl.constexpr, SCALE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_W: tl.constexpr, EXACT: tl.constexpr,
    SWAP: tl.constexpr, BIAS: tl.constexpr, GATED: tl.constexpr, CLAMPED: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """As ``grouped_kernel``, of packed weights: of each expert ROWS rows, their scales, and where
    GATHER where its inputs are found in x."""
    if PDL == 1:
        gdc_launch_dependents()
    if PDL != 0:
        gdc_wait()
    tile = tl.program_id(1)
    expert = tl.load(experts_ptr + tile)
    if expert < 0:
        return
    expert = expert.to(tl.int64)
    ROWS: tl.constexpr = 2 * N if GATED else N
    OUTPUTS: tl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N
    BLOCKS: tl.constexpr = (ROWS + ROW_BLOCK - 1) // ROW_BLOCK
    ROW_WORDS: tl.constexpr = COLUMNS * words_of(BITS)
    pairs = tl.load(order_ptr + tile * BLOCK_M + tl.arange(0, BLOCK_M))
    present = pairs >= 0
    local = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    if GATED:
        w_rows = tl.minimum(local // 2, N - 1) + local % 2 * N  # so that loads need no mask
    else:
        w_rows = tl.minimum(local, N - 1)
    scaled_rows = expert * (BLOCKS * GROUPS) + w_rows // ROW_BLOCK * GROUPS
    if TABLE == 2:
        table_rows = table_ptr + ((expert * ROWS + w_rows) * (1 << BITS))[:, None]
    else:
        table_rows = table_ptr + expert * (1 << BITS)
    if SWAP:
        acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    else:
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    STEPS: tl.constexpr = (COLUMNS + BLOCK_W - 1) // BLOCK_W
    acc = multiply(
        acc, x_ptr + (pairs // SHARE).to(tl.int64)[:, None] * X_INPUTS, present[:, None],
        w_ptr + expert * (ROWS * ROW_WORDS) + w_rows[:, None] * ROW_WORDS, table_rows,
        scales_ptr + scaled_rows, shifts_ptr + scaled_rows, scales_ptr,
        gather_ptr + expert * INPUTS, 0, STEPS,
        INPUTS, COLUMNS, WIDTH, BITS, GROUP, GROUPS, ZERO, SHIFT, TABLE, SCALE, BLOCK_W, EXACT,
        SWAP, False, False, GATHER,
    )  # fmt: skip
    if PDL == 2:
        gdc_launch_dependents()

    if SWAP:
        acc = tl.trans(acc)
    if SCALE and GROUP == 0:
        acc *= tl.load(scales_ptr + scaled_rows).to(tl.float32)[None, :]
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


@dataclass(frozen=True)
class Stack:
    """``packed``: its tensors have the experts as first axis. inputs: of x."""

    packed: Packed
    inputs: int


def stacked(weights: list[Any]) -> Stack:
    """Packs the experts' weights into one tensor each, and takes them from the list as it goes.
    Raises ValueError for experts whose weights differ in kind, and for outliers."""
    first, inputs = pack(weights[0]), weights[0].shape[1]
    if first.outliers is not None:
        raise ValueError("experts with outliers have no kernels on a GPU")
    room = {
        name: None if tensor is None else tensor.new_empty(len(weights), *tensor.shape)
        for name, tensor in _tensors(first).items()
    }
    for index in range(len(weights)):
        one = first if index == 0 else pack(weights[index])
        weights[index] = None
        if one.layout != first.layout:
            raise ValueError(
                f"weights of experts differ in kind: {first.layout} of the first, {one.layout} of "
                f"expert {index}"
            )
        for name, tensor in _tensors(one).items():
            place = room[name]
            if place is None or tensor is None:
                if place is not tensor:
                    raise ValueError(f"some experts have {name}, others, as expert {index}, none")
            elif tensor.dtype != place.dtype:
                raise ValueError(f"{name} of experts are {place.dtype} and {tensor.dtype}")
            else:
                place[index] = tensor
    words = room["words"]
    assert words is not None
    scales, shifts, table = room["scales"], room["shifts"], room["table"]
    packed = Packed(first.layout, words, scales, shifts, table, room["gather"], None)
    return Stack(packed, inputs)


def _tensors(packed: Packed) -> dict[str, Tensor | None]:
    names = ("words", "scales", "shifts", "table", "gather")
    return {name: getattr(packed, name) for name in names}


def plan_of(rows: int) -> PackedPlan:
    """rows: of a tile of pairs."""
    return PackedPlan("skinny", 64, 128, 4, 3 if rows <= 32 else 2)


class PackedExperts:
    """``plan``: what is used instead of ``plan_of``'s, for tuning and tests."""

    def __init__(
        self,
        gate_up: OfExperts,
        down: OfExperts,
        activation: Activation = "silu_mul",
        gate_up_bias: OfExperts | None = None,
        down_bias: OfExperts | None = None,
    ) -> None:
        """As the definition (ops/moe.py); the lists of weights are empty afterwards."""
        sizes = check_shapes(gate_up, down, gate_up_bias, down_bias)
        assert isinstance(gate_up, list) and isinstance(down, list)
        self.num_experts, self.hidden, self.inner = sizes
        self.gate_up, self.down = stacked(gate_up), stacked(down)
        self.gate_up_bias, self.down_bias = (
            torch.stack(bias) if isinstance(bias, list) else bias
            for bias in (gate_up_bias, down_bias)
        )
        self.clamped = activation == "swiglu_clamped"
        layouts = (self.gate_up.packed.layout, self.down.packed.layout)
        self.most_rows = min(rows_of_tile(layout) for layout in layouts)
        self.plan: PackedPlan | None = None

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
        count, pdl = tokens * top_k, pdl_for(tokens)
        rows = min(tile_rows(count, self.num_experts), self.most_rows)
        plan = self.plan or plan_of(rows)
        pairs = sort_by_expert(ids, self.num_experts, rows, pdl)
        inner = torch.empty(count, self.inner, dtype=x.dtype, device=x.device)
        grouped(plan, x, self.gate_up, self.gate_up_bias, inner, pairs, pdl, clamped=self.clamped)
        parts = torch.empty(count, self.hidden, dtype=x.dtype, device=x.device)
        grouped(plan, inner, self.down, self.down_bias, parts, pairs, pdl, weights)
        sum_of_pairs(parts, ids, other, y, pdl)
        return y


def grouped(
    plan: PackedPlan, x: Tensor, stack: Stack, bias: Tensor | None, y: Tensor, pairs: Sorted,
    pdl: int, weights: Tensor | None = None, clamped: bool = False,
) -> None:  # fmt: skip
    """x: [T, inputs] or [P, inputs]; y: [P, N], of 2N rows of the weight without ``weights`` (FP32,
    P of them), which is the gated product. Rows of y whose pair is left out are not written."""
    (count, n), gated, packed = y.shape, weights is None, stack.packed
    outputs = plan.block_n // 2 if gated else plan.block_n
    block_w = words_at_a_time(packed.layout, plan)
    stages = stages_that_fit(plan, packed, pairs.rows, block_w, x.element_size())
    packed_grouped_kernel[(triton.cdiv(n, outputs), pairs.count)](
        x, packed.words, *operands(packed, x), x if packed.gather is None else packed.gather,
        x if bias is None else bias, x if weights is None else weights, y, pairs.order,
        pairs.experts, N=n, X_INPUTS=stack.inputs, SHARE=count // len(x),
        GATHER=packed.gather is not None, **constants(packed), BLOCK_M=pairs.rows,
        BLOCK_N=plan.block_n, BLOCK_W=block_w, EXACT=plan.exact,
        SWAP=plan.swap and has_wgmma(), BIAS=bias is not None, GATED=gated, CLAMPED=clamped,
        PDL=pdl, **options(plan.num_warps, pdl, stages),
    )  # fmt: skip
