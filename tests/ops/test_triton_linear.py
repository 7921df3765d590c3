"""Triton's linear against the definition in FP64, interpreted on small shapes."""

from __future__ import annotations

from itertools import cycle

import pytest
import torch

from octavo.ops import registry
from octavo.ops.triton.plans import CUBLAS, Plan
from tests.ops.comparing import assert_close, expected_linear, randn

launch = pytest.importorskip("octavo.ops.triton.launch")
pytestmark = pytest.mark.skipif(not launch.INTERPRETED, reason="tests/gpu has them")

module = pytest.importorskip("octavo.ops.triton.linear")
TritonLinear, silu_mul = module.TritonLinear, module.silu_mul
(VERSION,) = (v for v in registry.versions("linear", "cuda") if v.name == "triton")
ROWS = (1, 2, 3, 8, 17, 33, 64, 65)
EPILOGUES = ("none", "add", "silu_mul", "logits")
DTYPES = (torch.float16, torch.bfloat16)
# Every row count and epilogue with and without bias, the dtypes in turn.
CASES = [
    pytest.param(rows, epilogue, bias, dtype, id=f"{rows}-{epilogue}-{bias}-{str(dtype)[6:]}")
    for (rows, epilogue, bias), dtype in zip(
        ((r, e, b) for r in ROWS for e in EPILOGUES for b in (False, True)),
        cycle((*DTYPES, *reversed(DTYPES))),
    )
]


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    """What a kernel does not write is NaN."""
    empty = torch.empty

    def nan(*size, **kwargs):
        return empty(*size, **kwargs).fill_(float("nan"))

    monkeypatch.setattr(torch, "empty", nan)


def check(rows, n, k, epilogue, bias, dtype, plan=None):
    """n: outputs. With ``plan``, for every bucket."""
    x = randn(rows, k).to(dtype)
    parts = 2 if epilogue == "silu_mul" else 1
    weights = [(randn(n, k, seed=s) / 10).to(dtype) for s in range(1, 1 + parts)]
    shift = randn(parts * n, seed=3).to(dtype) if bias else None
    other = randn(rows, n, seed=4).to(dtype) if epilogue == "add" else None
    expected = expected_linear(weights, shift, epilogue, x, other)
    linear = TritonLinear(weights, shift, epilogue)
    if plan is not None:
        linear.use(dict.fromkeys(linear.plans, plan))
    found = linear(x, other)
    assert found.dtype == (torch.float32 if epilogue == "logits" else dtype)
    assert_close(found, expected, VERSION, dtype)
    return linear, found


@pytest.mark.parametrize(("rows", "epilogue", "bias", "dtype"), CASES)
def test_linear(rows, epilogue, bias, dtype):
    """Odd sizes: neither n nor k is a multiple of any tile."""
    check(rows, 75, 136, epilogue, bias, dtype)


@pytest.mark.parametrize("n", (1, 7, 64))
@pytest.mark.parametrize("epilogue", ("add", "silu_mul"))
@pytest.mark.parametrize("rows", (1, 5))
def test_few_outputs(rows, epilogue, n):
    check(rows, n, 8, epilogue, True, torch.float16)


PLANS = {
    "gemv-one-block": (1, 24, Plan("gemv", 4, 64, 2), "silu_mul"),
    "gemv-four-blocks": (1, 250, Plan("gemv", 2, 64, 2), "add"),
    "split-2": (5, 256, Plan("skinny", 32, 64, 4, 4, split_k=2), "add"),
    "split-4-uneven": (20, 320, Plan("skinny", 32, 64, 4, 4, split_k=4), "silu_mul"),
    "split-4-of-3-blocks": (3, 136, Plan("skinny", 32, 64, 4, 4, split_k=4), "none"),
    "plain": (40, 72, Plan("skinny", 16, 64, 4, 4, swap=False), "logits"),
    "plain-split": (9, 136, Plan("skinny", 32, 32, 4, 4, split_k=2, swap=False), "silu_mul"),
}


@pytest.mark.parametrize(("rows", "k", "plan", "epilogue"), PLANS.values(), ids=PLANS)
def test_every_form_of_plan(rows, k, plan, epilogue):
    check(rows, 37, k, epilogue, True, torch.float16, plan)


def test_split_sums_leave_their_counters_at_zero_and_repeat():
    plan = Plan("skinny", 32, 64, 4, 4, split_k=4)
    linear, found = check(6, 70, 256, "none", False, torch.float16, plan)
    assert len(linear._arrived) == 3 and not linear._arrived.any()
    assert torch.equal(linear(randn(6, 256).half()), found)


def test_logits_are_not_rounded():
    x, weight = (randn(5, 96) * 8).half(), randn(400, 96, seed=1).half()
    exact = x.double() @ weight.double().T
    for rows in (1, 5):
        found = TritonLinear([weight], None, "logits")(x[:rows])
        assert (found - exact[:rows]).abs().max() <= 1e-3
        assert torch.equal(found.argmax(-1), exact[:rows].argmax(-1))


def test_no_rows_give_no_rows():
    """A step may want no logits."""
    weight = randn(75, 136).half()
    assert TritonLinear([weight], None, "logits")(torch.zeros(0, 136).half()).shape == (0, 75)
    assert TritonLinear([weight] * 2, None, "silu_mul")(torch.zeros(0, 136).half()).shape == (0, 75)


def test_one_weight_is_not_copied():
    weight = randn(75, 136).half()
    assert TritonLinear([weight], None, "none").weight.data_ptr() == weight.data_ptr()


def test_columns_that_are_no_multiple_of_8_go_to_cublas():
    linear, _ = check(3, 20, 42, "add", False, torch.float16)
    assert set(linear.plans.values()) == {CUBLAS}


def test_other_belongs_to_add_alone():
    x, weight = randn(1, 16).half(), randn(16, 16).half()
    with pytest.raises(ValueError, match="epilogue add"):
        TritonLinear([weight], None, "add")(x)
    with pytest.raises(ValueError, match="epilogue none"):
        TritonLinear([weight], None, "none")(x, x)


@pytest.mark.parametrize("rows", (1, 70))
def test_silu_mul(rows):
    x = randn(rows, 2 * 1030).half()
    gate, up = x.double().chunk(2, -1)
    assert_close(silu_mul(x), torch.nn.functional.silu(gate) * up, VERSION, torch.float16)
