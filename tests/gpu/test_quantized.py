"""Linears on quantized weights on a GPU, against the definitions, at sizes of real layers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from octavo.ops import float8, moe, quantized, registry
from octavo.ops.linear import silu_mul
from tests.ops.comparing import assert_close
from tests.ops.quantized_kinds import Kinds

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
N, K = 520, 2048
KINDS = Kinds().every(N, K)
ROWS = (1, 7, 40, 64, 100, 300)
BF16 = torch.bfloat16


def version(op):
    (found,) = (v for v in registry.versions(op, "cuda") if v.name == "triton")
    return found


def normal(*size, dtype=BF16, seed=0):
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(*size, device="cuda", generator=generator).to(dtype)


def exact(dense, bias, epilogue, x, other):
    y = x.double() @ dense.T
    if bias is not None:
        y = y + bias.double()
    if other is not None:
        y = y + other.double()
    return silu_mul(y) if epilogue == "silu_mul" else y


@pytest.mark.parametrize("name", KINDS)
def test_every_kind(name):
    weight = KINDS[name].to("cuda")
    dense, chosen = weight.dense().double(), version("weight_only_linear")
    for dtype in (BF16, torch.float16):
        bias, linears = normal(N, dtype=dtype, seed=3), {}
        for epilogue in ("add", "silu_mul", "logits"):
            linears[epilogue] = chosen.call([weight], bias, epilogue, dtype)
        for rows in ROWS if dtype == BF16 else ROWS[:2]:
            x = normal(rows, K, dtype=dtype, seed=rows)
            for epilogue, linear in linears.items():
                other = normal(rows, N, dtype=dtype, seed=4) if epilogue == "add" else None
                expected = exact(dense, bias, epilogue, x, other)
                found = linear(x, None if other is None else other.clone())
                assert_close(found, expected, chosen, dtype)


@pytest.mark.parametrize("block", ((0, 0), (1, 0), (128, 128)))
def test_float8_inputs(block):
    weight = Kinds().float8(1024, K, block).to("cuda")
    chosen, bias = version("float8_linear"), normal(1024, seed=3)
    for given in (None, torch.tensor(0.02, device="cuda")):
        if given is not None and block[1]:
            continue
        of = replace(weight, input_scale=given)
        for epilogue in ("add", "silu_mul", "logits"):
            linear = chosen.call([of], bias, epilogue, BF16)
            for rows in (1, 9, 20, 64, 100, 130, 514):
                x = normal(rows, K, seed=rows)
                other = normal(rows, 1024, seed=4) if epilogue == "add" else None
                if rows <= (16 if block[1] else 1):
                    expected = exact(of.dense().double(), bias, epilogue, x, other)
                else:
                    definition = float8.TorchFloat8Linear([of], bias, epilogue, torch.float32)
                    expected = definition(x, other).double()
                found = linear(x, None if other is None else other.clone())
                assert_close(found, expected, chosen, BF16)


@pytest.mark.parametrize("block", ((1, 0), (128, 128)))
def test_gates_are_activated_where_inputs_are_rounded(block):
    """As two linears do it apart, which write what is between them."""
    kinds, rows = Kinds(), 530
    first, second = kinds.float8(2 * K, 1024, block), kinds.float8(1024, K, block)
    gate_up = version("float8_linear").call([first.to("cuda")], normal(2 * K), "silu_mul", BF16)
    down = version("float8_linear").call([second.to("cuda")], None, "add", BF16)
    x, other = normal(rows, 1024, seed=1), normal(rows, 1024, seed=2)
    gates = gate_up.gates(x)
    assert gates.shape == (rows, 2 * K) and down.takes_gates
    expected = down(gate_up(x), other.clone()).double()
    assert_close(down(gates, other.clone()), expected, version("float8_linear"), BF16)


def test_int8_inputs():
    weight = Kinds().even(1024, K, 8, 65_536, dtype=torch.float32).to("cuda")
    chosen, bias = version("quantized_linear"), normal(1024, seed=3)
    for epilogue in ("add", "silu_mul", "logits"):
        linear = chosen.call([weight], bias, epilogue, BF16)
        definition = quantized.TorchQuantizedLinear([weight], bias, epilogue, torch.float32)
        for rows in (1, 20, 64, 100, 300):
            x = normal(rows, K, seed=rows)
            other = normal(rows, 1024, seed=4) if epilogue == "add" else None
            expected = definition(x, other).double()
            found = linear(x, None if other is None else other.clone())
            assert_close(found, expected, chosen, BF16)


def test_a_captured_product_repeats():
    """Also what is expanded into memory that others use in between."""
    weights = [KINDS[name].to("cuda") for name in ("4-bit-plain", "4-bit-zeros")]
    first, second = (version("weight_only_linear").call([w], None, "none", BF16) for w in weights)
    for rows in (1, 8, 300):
        x = normal(rows, K, seed=rows)
        expected = first(x), second(x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = first(x), second(x)
        for _ in range(3):
            graph.replay()
        for one, other in zip(found, expected):
            assert torch.equal(one, other)


EXPERTS = {
    "4-bit": lambda kinds, n, k: kinds.even(n, k, 4, 128, "zeros"),
    "4-bit-order": lambda kinds, n, k: kinds.even(n, k, 4, 32, order=True),
    "8-bit": lambda kinds, n, k: kinds.even(n, k, 8, 32),
    "table": lambda kinds, n, k: kinds.table(n, k, 4, 32),
    "float8": lambda kinds, n, k: kinds.float8(n, k, (1, 0)),
    "float8-block": lambda kinds, n, k: kinds.float8(n, k, (128, 128)),
}


@pytest.mark.parametrize("name", EXPERTS)
def test_experts(name):
    count, hidden, inner, top_k = 8, 512, 384, 2
    make, chosen = EXPERTS[name], version("moe_experts")
    gate_up = [make(Kinds(e), 2 * inner, hidden).to("cuda") for e in range(count)]
    down = [make(Kinds(9 + e), hidden, inner).to("cuda") for e in range(count)]
    exact = [torch.stack([w.dense().double() for w in part]) for part in (gate_up, down)]
    definition, made = moe.experts(*exact), chosen.call(gate_up, down)
    for tokens in (1, 8, 40, 300):
        x, other = (normal(tokens, hidden, seed=s) for s in (tokens, 4))
        ids = torch.stack([torch.randperm(count)[:top_k] for _ in range(tokens)]).int().cuda()
        weights = torch.rand(tokens, top_k, device="cuda")
        expected = definition(x.double(), ids, weights, other.double())
        assert_close(made(x, ids, weights, other.clone()), expected, chosen, BF16)
