"""Triton's linears on inputs of 8 bits (FP8, INT8) against the definitions, interpreted."""

from __future__ import annotations

import pytest
import torch

from octavo.ops import float8, quantized, registry
from octavo.ops.weight_only import TorchWeightOnlyLinear
from tests.ops.comparing import assert_close, randn
from tests.ops.quantized_kinds import Kinds

launch = pytest.importorskip("octavo.ops.triton.launch")
pytestmark = pytest.mark.skipif(not launch.INTERPRETED, reason="tests/gpu has them")

rounding = pytest.importorskip("octavo.ops.triton.rounding")
float8_module = pytest.importorskip("octavo.ops.triton.float8")
int8_module = pytest.importorskip("octavo.ops.triton.int8")
(FLOAT8,) = (v for v in registry.versions("float8_linear", "cuda") if v.name == "triton")
(INT8,) = (v for v in registry.versions("quantized_linear", "cuda") if v.name == "triton")
BF16 = torch.bfloat16


@pytest.mark.parametrize("group", (0, 64))
@pytest.mark.parametrize("given", (False, True))
def test_inputs_become_fp8_as_the_definition_says(group, given):
    x = (randn(5, 200) * 30).to(BF16)
    x[2] = 0
    scale = torch.tensor(0.11) if given else None
    values, scales = rounding.rounded(x, float8.E4M3, 0, group, scale)
    expected, expected_scales = float8.rounded(x, scale, group)
    assert torch.equal(values.float(), expected.float())
    assert torch.equal(scales, expected_scales)
    assert torch.equal(rounding.rounded(x, float8.E4M3, 0, group, scale, True)[1], scales)


def test_inputs_become_int8_as_the_definition_says():
    x = (randn(5, 200) * 3).to(BF16)
    x[3] = 0
    values, scales = rounding.rounded(x, torch.int8, 0)
    assert torch.equal(values * scales, quantized.rounded(x.float(), 200))


def check_float8(weights, rows, epilogue="none", bias=True, exact=False):
    n, k = sum(weight.shape[0] for weight in weights), weights[0].shape[1]
    x = randn(rows, k).to(BF16)
    shift = randn(n, seed=3).to(BF16) if bias else None
    other = randn(rows, n, seed=4).to(BF16) if epilogue == "add" else None
    of = TorchWeightOnlyLinear if exact else float8.TorchFloat8Linear
    dtype = torch.float64
    expected = of(weights, None if shift is None else shift.double(), epilogue, dtype)(
        x.double() if exact else x, None if other is None else other.double()
    )
    linear = float8_module.TritonFloat8Linear(weights, shift, epilogue, BF16)
    found = linear(x, other)
    assert_close(found, expected.double(), FLOAT8, BF16)
    return linear


@pytest.mark.parametrize("epilogue", ("add", "silu_mul", "logits"))
@pytest.mark.parametrize("block", ((0, 0), (1, 0), (16, 64), (32, 128)))
def test_few_rows_are_not_rounded_and_more_are(block, epilogue):
    weights = [Kinds(s).float8(32, 272, block) for s in range(1 + (epilogue == "silu_mul"))]
    check_float8(weights, 1, epilogue, exact=True)
    check_float8(weights, 3, epilogue, exact=block[1] > 1)
    check_float8(weights, 20, epilogue)
    check_float8(weights, 70, epilogue)


def test_given_scales_of_inputs():
    scales = (torch.tensor(0.01), torch.tensor(0.02))
    weights = [Kinds(s).float8(24, 64, (0, 0), input_scale=scale) for s, scale in enumerate(scales)]
    check_float8(weights[1:], 18)
    linear = float8_module.TritonFloat8Linear(weights, None, "none", BF16)
    assert len(linear.parts) == 1 and linear.parts[0].input_scale == 0.02


def test_blocks_of_no_power_of_two_keep_their_inputs():
    check_float8([Kinds().float8(32, 144, (32, 48))], 20, exact=True)


def test_other_types_and_parts():
    e5m2 = Kinds().float8(24, 64, (1, 0), torch.float8_e5m2)
    check_float8([e5m2], 40, exact=True)
    linear = check_float8([Kinds().float8(24, 64, (1, 0)), e5m2], 4, "silu_mul", exact=True)
    assert len(linear.parts) == 2


@pytest.mark.parametrize("epilogue", ("none", "add", "silu_mul", "logits"))
@pytest.mark.parametrize("rows", (1, 20, 70))
def test_int8(rows, epilogue):
    k, order = (200, True) if epilogue == "none" else (144, False)
    parts = 2 if epilogue == "silu_mul" else 1
    weights = [Kinds(s).even(40, k, 8, 65_536, dtype=torch.float32) for s in range(parts)]
    if order:
        weights = [Kinds().even(40, k, 8, 65_536, order=True)]
    x = randn(rows, k).to(BF16)
    bias = randn(40 * parts, seed=3).to(BF16)
    other = randn(rows, 40, seed=4).to(BF16) if epilogue == "add" else None
    expected = quantized.TorchQuantizedLinear(weights, bias, epilogue, torch.float32)(x, other)
    linear = int8_module.TritonInt8Linear(weights, bias, epilogue, BF16)
    assert_close(linear(x, other), expected.double(), INT8, BF16)
    ids = torch.tensor([3, 0])
    if parts == 1:
        exact = weights[0].dense()[ids]
        torch.testing.assert_close(linear.rows(ids).float(), exact, atol=0.02, rtol=0.01)


def test_int8_has_no_groups():
    with pytest.raises(ValueError, match=r"one scale for all 128 inputs .* groups of 32"):
        int8_module.TritonInt8Linear([Kinds().even(8, 128, 8, 32)], None, "none", BF16)


def test_gates_are_activated_where_inputs_are_rounded(monkeypatch):
    """As two linears do it apart, which write what is between them."""
    monkeypatch.setattr(float8_module, "OWN", 20)
    monkeypatch.setattr(float8_module, "NARROW", 0)
    first = [Kinds(seed).float8(64, 96, (1, 0)) for seed in (1, 2)]
    shift, other, x = (randn(*size).to(BF16) for size in ((128,), (24, 32), (24, 96)))
    gate_up = float8_module.TritonFloat8Linear(first, shift, "silu_mul", BF16)
    down = float8_module.TritonFloat8Linear([Kinds(3).float8(32, 64, (1, 0))], None, "add", BF16)
    assert gate_up.gates(x[:20]) is None
    gates = gate_up.gates(x)
    assert gates.shape == (24, 128)
    assert torch.equal(down(gates, other.clone()), down(gate_up(x), other.clone()))
