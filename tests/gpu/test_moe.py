"""Triton's routing and experts on a GPU: real shapes, every kind of plan, captured steps.

What a kernel does not write is NaN, or an index far outside. A captured step is replayed with other
routings, padding among them.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from octavo.ops import moe, registry
from octavo.ops.routing import Routing
from octavo.ops.triton.moe_sort import sort_by_expert
from tests.ops.comparing import assert_close
from tests.ops.moe_cases import MIXTRAL, QWEN3, ROUTINGS, Weights, random_choice

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

BF16, FP16 = torch.bfloat16, torch.float16
SHAPES = {  # routing, hidden size, an expert's size, activation, biases, deviation, dtype, tokens
    "qwen3-30b-a3b": (
        QWEN3,
        2048,
        768,
        "silu_mul",
        False,
        1.0,
        BF16,
        (1, 2, 4, 5, 8, 64, 200, 512),
    ),
    "mixtral": (MIXTRAL, 4096, 3584, "silu_mul", False, 1.0, BF16, (1, 2, 64, 1500)),
    "gpt-oss": (Routing(32, 4), 2880, 2880, "swiglu_clamped", True, 4.0, FP16, (1, 9, 200)),
    "odd": (Routing(6, 3), 75, 42, "silu_mul", True, 1.0, BF16, (1, 7, 300)),
}


def version(op: str) -> registry.Version:
    found = registry.select(op, "cuda", BF16)
    assert found.name == "triton"
    return found


@pytest.fixture
def poisoned(monkeypatch):
    empty = torch.empty

    def poison(*size, **kwargs):
        values = empty(*size, **kwargs)
        return values.fill_(float("nan") if values.is_floating_point() else 1 << 30)

    monkeypatch.setattr(torch, "empty", poison)


def inputs(tokens: int, hidden: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(tokens, hidden, device="cuda", generator=generator).to(dtype)


@pytest.mark.parametrize("name", SHAPES)
@torch.inference_mode()
def test_experts(name, poisoned):
    routing, hidden, inner, activation, bias, scale, dtype, counts = SHAPES[name]
    tested, experts = version("moe_experts"), routing.num_experts
    w = Weights.random(experts, hidden, inner, dtype, activation, bias, "cuda", scale)
    apply = w.made(tested.call)
    for tokens in counts:
        kind = ("random", "skewed", "holes")[tokens % 3]
        x, other = inputs(tokens, hidden, dtype), inputs(tokens, hidden, dtype, seed=1)
        ids, weights = random_choice(tokens, experts, routing.top_k, kind, "cuda")
        for added in (None, other) if tokens < 100 else (other,):
            found = apply(x, ids, weights, None if added is None else added.clone())
            assert_close(found, w.expected(x, ids, weights, added), tested, dtype)
            if added is None:
                assert not found[(ids < 0).all(-1)].any()


@pytest.mark.parametrize("kind", ("random", "skewed", "holes"))
@pytest.mark.parametrize("tokens", (1, 64, 512, 513, 5000))
def test_sort(tokens, kind, poisoned):
    """Pairs of an expert lie together and in their order, as a stable sort has them."""
    ids, _ = random_choice(tokens, 128, 8, kind, "cuda")
    flat = ids.flatten()
    for rows in (16, 64):
        found = sort_by_expert(ids, 128, rows)
        counts = torch.bincount(flat[flat >= 0], minlength=128)
        tiles = (counts + rows - 1) // rows
        used = int(tiles.sum())
        expected = torch.arange(128, device="cuda").repeat_interleave(tiles)
        assert torch.equal(found.experts[:used].long(), expected)
        assert (found.experts[used:] == -1).all()
        order = found.order[: used * rows]
        pairs = order[order >= 0].long()
        ranked = flat.sort(stable=True)
        assert torch.equal(pairs, ranked.indices[ranked.values >= 0])
        assert torch.equal(flat[pairs], expected.repeat_interleave(rows)[order >= 0].int())


@pytest.mark.parametrize("dtype", (torch.float32, BF16))
@pytest.mark.parametrize(("routing", "corrected"), ROUTINGS.values(), ids=ROUTINGS)
@torch.inference_mode()
def test_route(routing, corrected, dtype, poisoned):
    tested = version("moe_route")
    for tokens in (1, 8, 300):
        logits = inputs(tokens, routing.num_experts, dtype, seed=tokens)
        correction = inputs(1, routing.num_experts, torch.float32, seed=1)[0] if corrected else None
        slots = torch.arange(tokens, device="cuda")
        slots[2::5] = -1
        ids, weights = tested.call(logits, routing, correction, slots)
        expected_ids, expected = moe.route(logits.double(), routing, correction, slots)
        assert ids.dtype == torch.int32 and weights.dtype == torch.float32
        # Scores may tie in FP32 that FP64 tells apart: then the places' weights are equal.
        same = (ids == expected_ids).all(-1)
        assert same.float().mean() >= 0.99
        torch.testing.assert_close(weights[same], expected[same], rtol=1e-5, atol=0)
        assert (ids[2::5] == -1).all() and not weights[2::5].any()


@pytest.mark.parametrize("tokens", (1, 4, 8, 64, 512))
@torch.inference_mode()
def test_captured_step_serves_any_routing(tokens):
    """Two layers, so that kernels follow each other as they do in a model."""
    tested, routed = version("moe_experts"), version("moe_route")
    w = Weights.random(128, 2048, 768, BF16, device="cuda")
    apply = w.made(tested.call)
    x, logits = inputs(tokens, 2048, BF16), inputs(tokens, 128, BF16)
    slots = torch.arange(tokens, device="cuda")

    def layers(route, experts) -> list[Tensor]:
        ids, weights = route(logits, QWEN3, None, slots)
        first = experts(x, ids, weights, None)
        return [first, experts(first, ids, weights, first.clone())]

    layers(routed.call, apply)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = layers(routed.call, apply)
    for seed in range(1, 5):
        x.copy_(inputs(tokens, 2048, BF16, seed))
        logits.copy_(inputs(tokens, 128, BF16, seed + 10))
        if seed == 3:
            logits[:, :8] += 50  # all tokens on eight experts
        slots.copy_(torch.arange(tokens))
        slots[1::seed] = -1
        results = []
        for _ in range(2):
            for y in found:
                y.fill_(float("nan"))
            graph.replay()
            results.append([y.clone() for y in found])
        assert all(torch.equal(*pair) for pair in zip(*results))
        ids, weights = moe.route(logits, QWEN3, None, slots)
        first = w.expected(x, ids, weights, None)
        assert_close(results[0][0], first, tested, BF16)
        rounded = results[0][0]
        assert_close(results[0][1], w.expected(rounded, ids, weights, rounded), tested, BF16)


@torch.inference_mode()
def test_tokens_do_not_depend_on_their_order():
    w = Weights.random(128, 2048, 768, BF16, device="cuda")
    apply = w.made(version("moe_experts").call)
    x = inputs(200, 2048, BF16)
    ids, weights = random_choice(200, 128, 8, device="cuda")
    found = apply(x, ids, weights)
    for _ in range(10):
        turned = torch.randperm(200, device="cuda")
        assert torch.equal(apply(x[turned], ids[turned], weights[turned]), found[turned])
