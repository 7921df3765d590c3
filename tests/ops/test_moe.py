"""The definitions of routing and experts, against the same in plain loops."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from octavo.ops import moe, registry
from octavo.ops.float8 import quantize_float8
from octavo.ops.quantized import quantize
from octavo.ops.routing import Routing
from octavo.ops.tables import quantize_table
from octavo.quant.bitsandbytes import TABLES
from octavo.quant.multiply import LinearVersions
from tests.ops.comparing import assert_close, randn
from tests.ops.moe_cases import DEEPSEEK_V3, ROUTINGS, Weights, random_choice


def chosen_in_loops(row, routing, correction):
    """One token: (id, weight) of each choice, best first."""
    top = max(row)
    total = sum(math.exp(v - top) for v in row)
    soft = routing.score == "softmax"
    scores = [math.exp(v - top) / total if soft else 1 / (1 + math.exp(-v)) for v in row]
    choice = [s + c for s, c in zip(scores, correction)]
    size = len(row) // routing.groups
    taken = 1 if routing.group_score == "max" else 2
    worth = [sum(sorted(choice[g * size : (g + 1) * size])[-taken:]) for g in range(routing.groups)]
    kept = sorted(range(routing.groups), key=lambda g: -worth[g])[: routing.groups_kept]
    allowed = [e for e in range(len(row)) if e // size in kept]
    ids = sorted(allowed, key=lambda e: -choice[e])[: routing.top_k]
    total = sum(scores[e] for e in ids) if routing.renormalize else 1.0
    return [(e, scores[e] / total * routing.scale) for e in ids]


@pytest.mark.parametrize(("routing", "corrected"), ROUTINGS.values(), ids=ROUTINGS)
def test_routing(routing, corrected):
    logits = 2 * randn(20, routing.num_experts)
    correction = randn(routing.num_experts, seed=1) if corrected else None
    ids, weights = moe.route(logits, routing, correction)
    assert ids.dtype == torch.int32 and weights.dtype == torch.float32
    shift = correction.tolist() if corrected else [0.0] * routing.num_experts
    for row, found_ids, found_weights in zip(logits.tolist(), ids, weights):
        expected = chosen_in_loops(row, routing, shift)
        assert found_ids.tolist() == [e for e, _ in expected]
        assert found_weights.tolist() == pytest.approx([w for _, w in expected], rel=1e-6)


def test_equal_scores_go_to_the_lower_id():
    logits = torch.tensor([[1.0, 2.0, 2.0, 1.0, 2.0, 1.0]]).bfloat16()
    ids, weights = moe.route(logits, Routing(6, 4))
    assert ids.tolist() == [[1, 2, 4, 0]]
    assert weights.sum().item() == pytest.approx(1.0)


def test_padding_tokens_go_to_no_expert():
    ids, weights = moe.route(randn(3, 8), Routing(8, 2), slots=torch.tensor([5, -1, 0]))
    assert ids[1].tolist() == [-1, -1] and weights[1].tolist() == [0.0, 0.0]
    assert (ids[::2] >= 0).all() and (weights[::2] > 0).all()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_experts": 10, "top_k": 2, "groups": 4}, "10 experts do not divide into 4 groups"),
        ({"num_experts": 8, "top_k": 5, "groups": 4, "groups_kept": 2}, "5 experts a token, of 2"),
        ({"num_experts": 8, "top_k": 2, "groups": 4, "groups_kept": 5}, "5 groups kept, of 4"),
        ({"num_experts": 4, "top_k": 1, "groups": 4, "group_score": "top2"}, "group_score max"),
    ],
)
def test_impossible_routings_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        Routing(**arguments)


def test_v3_weights_are_scores_without_the_correction():
    logits = randn(9, 256)
    ids, weights = moe.route(logits, DEEPSEEK_V3, correction=randn(256, seed=2))
    scores = logits.sigmoid().gather(-1, ids.long())
    expected = 2.5 * scores / scores.sum(-1, keepdim=True)
    torch.testing.assert_close(weights, expected.float())


def activated_in_loops(activation, gate, up):
    if activation == "silu_mul":
        return gate / (1 + math.exp(-gate)) * up
    gate, up = min(gate, 7.0), max(-7.0, min(up, 7.0))
    return (up + 1) * gate / (1 + math.exp(-1.702 * gate))


@pytest.mark.parametrize("kind", ("random", "skewed", "holes"))
@pytest.mark.parametrize("activation", ("silu_mul", "swiglu_clamped"))
def test_experts(activation, kind):
    w = Weights.random(5, 10, 6, torch.float64, activation, bias=True, scale=4.0)
    gate_up_bias, down_bias = w.biases
    x, other = randn(7, 10), randn(7, 10, seed=1)
    ids, weights = random_choice(7, 5, 2, kind)
    expected = other.clone()
    for token, slot in torch.cartesian_prod(torch.arange(7), torch.arange(2)).tolist():
        expert = int(ids[token, slot])
        if expert >= 0:
            both = (w.gate_up[expert] @ x[token] + gate_up_bias[expert]).tolist()
            pairs = zip(both[:6], both[6:])
            inner = torch.tensor(
                [activated_in_loops(activation, *pair) for pair in pairs], dtype=torch.float64
            )
            part = w.down[expert] @ inner + down_bias[expert]
            expected[token] += weights[token, slot].double() * part
    found = w.made(moe.experts)(x, ids, weights, other)
    torch.testing.assert_close(found, expected)


FAST = [v for v in registry.versions("moe_experts") if v.name == "native"]


@pytest.mark.parametrize("listed", (False, True))
@pytest.mark.parametrize("kind", ("random", "skewed", "holes"))
@pytest.mark.parametrize("activation", ("silu_mul", "swiglu_clamped"))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
@pytest.mark.parametrize("version", FAST, ids=lambda version: version.name)
def test_other_versions_on_a_cpu(version, dtype, activation, kind, listed):
    if not version.available("cpu", dtype):
        pytest.skip("this CPU has no kernel for it")
    w = Weights.random(9, 70, 36, dtype, activation, bias=activation != "silu_mul", scale=4.0)
    for tokens in (1, 3, 40):
        x, other = randn(tokens, 70).to(dtype), randn(tokens, 70, seed=1).to(dtype)
        ids, weights = random_choice(tokens, 9, 3, kind)
        call = version.call
        if listed:
            parts = [list(w.gate_up), list(w.down), *map(list, w.biases)]
            made = call(*parts[:2], activation, *parts[2:])
            assert not any(len(weight) for weight in (*parts[0], *parts[1]))  # let go
        else:
            made = w.made(call)
        for added in (None, other):
            expected = w.expected(x, ids, weights, added)
            found = made(x, ids, weights, added)
            if expected.any():
                assert_close(found, expected, version, dtype)
            else:  # no token has an expert
                assert not found.any()
        assert made(x[:0], ids[:0], weights[:0]).shape == (0, 70)


def test_lists_of_experts_are_as_one_tensor():
    w = Weights.random(4, 8, 6, torch.float32, bias=True)
    x, (ids, weights) = randn(5, 8).float(), random_choice(5, 4, 2)
    lists = [list(w.gate_up), list(w.down), *map(list, w.biases)]
    found = moe.experts(*lists[:2], w.activation, *lists[2:])(x, ids, weights)
    assert torch.equal(found, w.made(moe.experts)(x, ids, weights))
    with pytest.raises(ValueError, match="experts of different shapes"):
        moe.experts(list(w.gate_up), [*w.down[:3], w.down[0][:4]])


QUANTIZED_EXPERTS = {
    "QuantizedWeight": lambda weight: quantize(weight, 16),
    "TableWeight": lambda weight: quantize_table(weight, TABLES["nf4"], 16),
    "Float8Weight": lambda weight: quantize_float8(weight, (1, 0)),
}


@pytest.mark.parametrize("kind", QUANTIZED_EXPERTS)
@pytest.mark.parametrize("activation", ("silu_mul", "swiglu_clamped"))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
def test_quantized_experts_are_those_they_stand_for(dtype, activation, kind):
    """In every version on a CPU. Inputs of QuantizedWeight are rounded to 8 bits there."""
    make = QUANTIZED_EXPERTS[kind]
    w = Weights.random(5, 64, 48, torch.float32, activation, bias=True)
    gate_up, down = ([make(one) for one in weights] for weights in (w.gate_up, w.down))
    dense = [torch.stack([one.dense() for one in some]) for some in (gate_up, down)]
    wide = replace(w, gate_up=dense[0], down=dense[1])
    x, (ids, weights) = randn(11, 64).to(dtype), random_choice(11, 5, 2)
    expected = wide.expected(x, ids, weights, None)
    multiply = LinearVersions(None, "cpu", dtype).multiplier
    for version in registry.versions("moe_experts"):
        if not version.available("cpu", dtype):
            continue
        biases = [bias.to(dtype) for bias in w.biases]
        made = version.call(list(gate_up), list(down), activation, *biases, linear=multiply)
        error = (made(x, ids, weights) - expected).abs().max() / expected.abs().max()
        rounded = kind == "QuantizedWeight" and version.name == "native"
        assert error < (0.03 if rounded else 4 * torch.finfo(dtype).eps), version.name


def test_quantized_experts_need_what_makes_linears_of_them():
    down = [quantize(torch.ones(4, 8), 8)]
    for version in FAST:
        if version.available("cpu", torch.float32):
            with pytest.raises(ValueError, match="experts of QuantizedWeight without"):
                version.call([quantize(torch.ones(16, 4), 4)], down)


def test_a_token_without_experts_gives_zeros():
    ids, weights = torch.full((1, 2), -1, dtype=torch.int32), torch.ones(1, 2)
    w = Weights.random(4, 8, 8, torch.float32, bias=True)
    assert not w.made(moe.experts)(torch.ones(1, 8), ids, weights).any()


def test_weights_that_do_not_belong_together_are_refused():
    w = Weights.random(4, 8, 6, torch.float32, bias=True)
    with pytest.raises(ValueError, match=r"gate_up is \[4, 11, 8\], .* asks for \[4, 12, 8\]"):
        moe.experts(w.gate_up[:, 1:], w.down)
    with pytest.raises(ValueError, match=r"down_bias is \[4, 7\], .* asks for \[4, 8\]"):
        moe.experts(w.gate_up, w.down, "silu_mul", w.biases[0], w.biases[1][:, 1:])
