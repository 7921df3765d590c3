"""Parts of weights mean the same numbers as the parts of what the weights mean."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from octavo.ops.cut import inputs_of, outputs_of
from octavo.ops.weights import (
    Float8Weight,
    Outliers,
    QuantizedWeight,
    Selected,
    TableWeight,
    Weight,
    dense,
)

OUT, IN = 72, 200


def quantized(bits: int, group: int, **extra: bool) -> QuantizedWeight:
    codes = torch.randint(0, 1 << bits, (OUT, IN), dtype=torch.uint8)
    groups = -(-IN // group)
    scales = torch.rand(OUT, groups) + 0.1
    minimums = torch.randn(OUT, groups) if extra.get("minimums") else None
    zeros = torch.randint(0, 1 << bits, (OUT, groups), dtype=torch.uint8)
    order = torch.randperm(IN) if extra.get("order") else None
    plain = minimums is not None or not extra.get("zeros")
    return QuantizedWeight(
        *(codes, scales, minimums, bits, group),
        zeros=None if plain else zeros,
        order=order,
    )


def table(group: int, outliers: bool = False) -> TableWeight:
    codes = torch.randint(0, 16, (OUT, IN), dtype=torch.uint8)
    scales = torch.rand(OUT, -(-IN // group)) if group else None
    found = None
    if outliers:
        places = (torch.rand(OUT, IN) < 0.02).nonzero()
        starts = torch.bincount(places[:, 0], minlength=OUT).cumsum(0)
        starts = torch.cat((starts.new_zeros(1), starts)).int()
        found = Outliers(starts, places[:, 1].int(), torch.randn(len(places)))
    rows = torch.randn(OUT, 16) if outliers else torch.randn(16)
    return TableWeight(codes, rows, scales, 4, group, found)


def float8(block: tuple[int, int]) -> Float8Weight:
    sizes = [1 if not span else -(-size // span) for span, size in zip(block, (OUT, IN))]
    return Float8Weight(torch.randn(OUT, IN).to(torch.float8_e4m3fn), torch.rand(*sizes), block)


WEIGHTS: dict[str, Weight] = {
    "dense": torch.randn(OUT, IN),
    "zeros": quantized(4, 64, zeros=True),
    "minimums": quantized(8, 32, minimums=True),
    "one group": quantized(4, 256),
    "order": quantized(4, 64, zeros=True, order=True),
    "order, minimums": quantized(3, 16, minimums=True, order=True),
    "table": table(64),
    "outliers": table(0, outliers=True),
    "fp8 by block": float8((16, 128)),
    "fp8 by channel": float8((1, 0)),
    "fp8 by tensor": float8((0, 0)),
}


def meant(weight: Weight | Selected) -> Tensor:
    return dense(weight, torch.float32)


@pytest.mark.parametrize("kind", WEIGHTS)
@pytest.mark.parametrize("first,end", [(0, 64), (64, 200), (40, 120), (96, 101), (0, IN), (7, 200)])
def test_inputs(kind: str, first: int, end: int) -> None:
    weight = WEIGHTS[kind]
    found = inputs_of(weight, first, end)
    assert torch.equal(meant(found), meant(weight)[:, first:end])
    if isinstance(found, Selected):
        x = torch.randn(5, end - first, dtype=torch.float64)
        exact = x @ meant(weight)[:, first:end].double().T
        assert (found.taken(x) @ found.weight.dense().double().T - exact).abs().max() < 1e-9
        assert torch.equal(meant(found[3:9]), meant(weight)[3:9, first:end])


@pytest.mark.parametrize("kind", WEIGHTS)
@pytest.mark.parametrize(
    "ranges", [((0, 32),), ((32, 72),), ((16, 24),), ((5, 9),), ((3, 20), (40, 57)), ((0, OUT),)]
)
def test_outputs(kind: str, ranges: tuple[tuple[int, int], ...]) -> None:
    weight = WEIGHTS[kind]
    rows = torch.cat([torch.arange(first, end) for first, end in ranges])
    found = outputs_of(weight, ranges)
    assert torch.equal(meant(found), meant(weight)[rows])


def test_groups_stay_as_large_as_kernels_like_them() -> None:
    """A part that begins within a group of 64 halves it; what would be cut to crumbs is fed zeros
    instead."""
    weight = WEIGHTS["zeros"]
    halved, fed = inputs_of(weight, 96, 200), inputs_of(weight, 40, 120)
    assert isinstance(halved, QuantizedWeight) and halved.group == 32
    assert isinstance(fed, Selected) and fed.weight.shape == (OUT, 80 + 40)
    assert isinstance(fed.weight, QuantizedWeight) and fed.weight.group == 64
    block = inputs_of(replace(float8((16, 128))), 192, 200)
    assert isinstance(block, Selected) and block.weight.shape == (OUT, 8 + 64)
