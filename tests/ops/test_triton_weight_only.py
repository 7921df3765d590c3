"""Triton's linear on packed weights against the definition in FP64, interpreted on small shapes."""

from __future__ import annotations

import pytest
import torch

from octavo.ops import registry
from octavo.ops.weight_only import TorchWeightOnlyLinear
from tests.ops.comparing import assert_close, randn
from tests.ops.quantized_kinds import Kinds

launch = pytest.importorskip("octavo.ops.triton.launch")
pytestmark = pytest.mark.skipif(not launch.INTERPRETED, reason="tests/gpu has them")

plans = pytest.importorskip("octavo.ops.triton.packed_plans")
module = pytest.importorskip("octavo.ops.triton.weight_only")
Linear, PackedPlan = module.TritonWeightOnlyLinear, plans.PackedPlan
(VERSION,) = (v for v in registry.versions("weight_only_linear", "cuda") if v.name == "triton")
KINDS = Kinds().every(33, 136)


def check(weights, rows, epilogue="none", bias=False, dtype=torch.bfloat16, plan=None):
    n, k = sum(weight.shape[0] for weight in weights), weights[0].shape[1]
    x = randn(rows, k).to(dtype)
    shift = randn(n, seed=3).to(dtype) if bias else None
    other = randn(rows, n, seed=4).to(dtype) if epilogue == "add" else None
    exact = TorchWeightOnlyLinear(
        weights, None if shift is None else shift.double(), epilogue, torch.float64
    )
    expected = exact(x.double(), None if other is None else other.double())
    linear = Linear(weights, shift, epilogue, dtype)
    if plan is not None:
        for part in linear.parts:
            part.use(dict.fromkeys(part.plans, plan))
    found = linear(x, other)
    assert found.dtype == (torch.float32 if epilogue == "logits" else dtype)
    assert_close(found, expected, VERSION, dtype)
    return linear, found


@pytest.mark.parametrize("name", KINDS)
def test_every_kind_by_every_kernel(name):
    """One row, tensor cores, expanded: the last bits are BF16's, so logits show more."""
    weight = KINDS[name]
    check([weight], 1, "logits")
    check([weight], 5, "logits")
    if "zeros" in name or "table" in name or "float8" in name:
        check([weight], 300)


@pytest.mark.parametrize(
    "name", [name for name in KINDS if "4-bit" in name or name == "3-bit-zeros"]
)
def test_every_grid_in_fp16(name):
    half = PackedPlan("gemv", 4, 64, 1, half=True)
    check([KINDS[name]], 1, dtype=torch.float16, plan=half)
    rounded = PackedPlan("skinny", 64, 64, 4, 3, exact=False, swap=False)
    check([KINDS[name]], 3, dtype=torch.float16, plan=rounded)


@pytest.mark.parametrize("epilogue", ("none", "add", "silu_mul", "logits"))
@pytest.mark.parametrize("rows", (1, 20, 70, 257))
def test_every_epilogue(rows, epilogue):
    kinds = Kinds(1)
    parts = [kinds.even(37, 136, 4, 32, "zeros") for _ in range(2 if epilogue == "silu_mul" else 1)]
    check(parts, rows, epilogue, bias=True)


def test_outliers_stand_before_the_activation():
    kinds = Kinds(2)
    for rows in (1, 6, 300):
        parts = [kinds.table(20, 72, 4, of_rows=True, outliers=5) for _ in range(2)]
        check(parts, rows, "silu_mul")


@pytest.mark.parametrize("epilogue", ("add", "silu_mul", "logits"))
def test_parts_of_different_kinds_are_multiplied_apart(epilogue):
    kinds = Kinds(3)
    parts = [kinds.even(24, 64, 4, 32, order=True), kinds.even(24, 64, 4, 32, order=True)]
    linear, _ = check(parts, 2, epilogue, bias=True)
    assert len(linear.parts) == 2
    mixed = [kinds.float8(10, 64, (1, 0)), kinds.float8(6, 64, (0, 0)), kinds.table(8, 64, 4, 16)]
    mixed = mixed if epilogue != "silu_mul" else [*mixed, kinds.even(24, 64, 8, 64)]
    linear, _ = check(mixed, 1, epilogue)
    assert len(linear.parts) == (2 if epilogue != "silu_mul" else 3)


PLANS = {
    "gemv-uneven-blocks": (1, PackedPlan("gemv", 4, 64, 1)),
    "gemv-wide": (1, PackedPlan("gemv", 2, 128, 2)),
    "gemv-half": (1, PackedPlan("gemv", 4, 64, 1, half=True)),
    "split-3": (5, PackedPlan("skinny", 32, 64, 4, 4, split_k=3)),
    "plain-split": (20, PackedPlan("skinny", 16, 64, 4, 4, split_k=2, swap=False)),
    "rounded": (20, PackedPlan("skinny", 64, 64, 4, 4, exact=False)),
    "expanded": (2, plans.EXPAND),
}


@pytest.mark.parametrize(("rows", "plan"), PLANS.values(), ids=PLANS)
@pytest.mark.parametrize("kind", ("4-bit", "float8"))
def test_every_form_of_plan(kind, rows, plan):
    kinds = Kinds(4)
    weight = {
        "4-bit": lambda: kinds.even(33, 336, 4, 64, "minimums"),
        "float8": lambda: kinds.float8(33, 336, (16, 128)),
    }[kind]()
    linear, _ = check([weight], rows, "add", bias=True, plan=plan)
    assert not linear.parts[0]._arrived.any()


@pytest.mark.parametrize("name", ("4-bit-order", "table-3-rows-odd", "float8-1-0"))
def test_rows_of_the_weight(name):
    weight, ids = KINDS[name], torch.tensor([32, 0, 7, 7])
    found = Linear([weight], None, "none", torch.float16).rows(ids)
    torch.testing.assert_close(found.double(), weight.dense()[ids].double(), atol=5e-3, rtol=1e-3)


def test_sums_in_fp16_take_inputs_of_any_size():
    """Beside FP16's largest, and so small that it would round them to nothing."""
    weight = Kinds().even(33, 336, 4, 64, "minimums")
    for size in (1e30, 1e-30):
        linear = Linear([weight], None, "logits", torch.bfloat16)
        for part in linear.parts:
            part.use({1: PackedPlan("gemv", 4, 64, 1, half=True)})
        x = (randn(1, 336) * size).bfloat16()
        expected = x.double() @ weight.dense().double().T
        assert_close(linear(x), expected, VERSION, torch.float16)


def test_codes_take_their_bits_and_no_more():
    for bits in (2, 3, 4, 8):
        (part,) = Linear([Kinds().even(8, 4096, bits, 128)], None, "none", torch.bfloat16).parts
        assert part.packed.words.nbytes == 8 * 4096 * bits // 8


def test_large_weights_are_expanded_some_rows_at_a_time(monkeypatch):
    expand = module.expand.__globals__
    monkeypatch.setitem(expand, "AT_A_TIME", 136 * 16)
    monkeypatch.setitem(expand, "TILE", 16)
    monkeypatch.setitem(expand, "_scratch", {})
    check([Kinds().even(37, 136, 4, 32)], 300, "add", bias=True)
    (memory,) = expand["_scratch"].values()
    assert memory.numel() == 136 * 16


def test_pieces_of_an_expanded_weight_are_whole_tiles(monkeypatch):
    """Ragged ones halve cuBLAS's speed. A piece is one tile at the least, and no more than all."""
    expand = module.expand.__globals__
    monkeypatch.setitem(expand, "AT_A_TIME", 136 * 1000)
    packed = module.pack(Kinds().even(900, 136, 4, 32))
    assert module.rows_at_a_time(packed) == 768
    monkeypatch.setitem(expand, "AT_A_TIME", 1)
    assert module.rows_at_a_time(packed) == 256
    assert module.rows_at_a_time(module.pack(Kinds().even(37, 136, 4, 32))) == 37


def test_no_rows_give_no_rows():
    weight = Kinds().even(37, 136, 4, 32)
    linear = Linear([weight], None, "logits", torch.float16)
    assert linear(torch.zeros(0, 136).half()).shape == (0, 37)
