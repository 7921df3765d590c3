"""Triton's routing, sort and experts against the definitions, interpreted on small shapes."""

from __future__ import annotations

import pytest
import torch

from octavo.ops import moe, registry
from tests.ops.comparing import assert_close, randn
from tests.ops.moe_cases import ROUTINGS, Weights, random_choice

launch = pytest.importorskip("octavo.ops.triton.launch")
pytestmark = pytest.mark.skipif(not launch.INTERPRETED, reason="tests/gpu has them")

plans = pytest.importorskip("octavo.ops.triton.moe_plans")
sorting = pytest.importorskip("octavo.ops.triton.moe_sort")
EXPERTS = registry.select("moe_experts", "cuda", torch.float16)
ROUTE = registry.select("moe_route", "cuda", torch.float16)
FP16, BF16 = torch.float16, torch.bfloat16
PAIRS = plans.Plans(plans.PairPlan(8, 32, 2), plans.PairPlan(16, 16, 2))


def tiles(rows: int, block_n: int = 32, block_k: int = 32, swap: bool = True) -> plans.Plans:
    plan = plans.GroupedPlan(rows, block_n, block_k, 4, 3, swap)
    return plans.Plans(plan, plan)


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    """What a kernel does not write is NaN, or an index far outside."""
    empty = torch.empty

    def poison(*size, **kwargs):
        values = empty(*size, **kwargs)
        return values.fill_(float("nan") if values.is_floating_point() else 1 << 30)

    monkeypatch.setattr(torch, "empty", poison)


def test_both_are_triton_versions():
    assert EXPERTS.name == ROUTE.name == "triton"


@pytest.mark.parametrize("dtype", (torch.float32, BF16))
@pytest.mark.parametrize(("routing", "corrected"), ROUTINGS.values(), ids=ROUTINGS)
def test_route(routing, corrected, dtype):
    """BF16 logits have many equals: ids are the definition's then, too."""
    logits = (2 * randn(6, routing.num_experts)).to(dtype)
    correction = randn(routing.num_experts, seed=1).float() if corrected else None
    slots = torch.tensor([0, 7, -1, 3, 9, -1])
    ids, weights = ROUTE.call(logits, routing, correction, slots)
    expected_ids, expected = moe.route(logits, routing, correction, slots)
    assert torch.equal(ids, expected_ids)
    torch.testing.assert_close(weights, expected, rtol=1e-6, atol=0)


def test_no_tokens():
    ids, weights = ROUTE.call(randn(0, 8).half(), moe.Routing(8, 2))
    assert ids.shape == weights.shape == (0, 2)
    w = Weights.random(8, 16, 8, FP16)
    assert w.made(EXPERTS.call)(randn(0, 16).half(), ids, weights).shape == (0, 16)


def check_sorted(ids, experts, rows):
    found = sorting.sort_by_expert(ids, experts, rows)
    flat, order = ids.flatten().tolist(), found.order.view(-1, rows).tolist()
    seen = []
    used = [e for e in found.experts.tolist() if e >= 0]
    assert found.experts.tolist() == used + [-1] * (found.count - len(used))
    assert used == sorted(used)
    for expert, tile in zip(used, order):
        members = [pair for pair in tile if pair >= 0]
        assert tile == members + [-1] * (rows - len(members)) and members
        assert all(flat[pair] == expert for pair in members)
        seen += members
    # Every pair once, and those of an expert in their order.
    assert seen == sorted((p for p, e in enumerate(flat) if e >= 0), key=lambda p: (flat[p], p))
    full = sum(-(-flat.count(e) // rows) for e in range(experts))
    assert len(used) == full <= found.count
    return found


@pytest.mark.parametrize("kind", ("random", "skewed", "holes"))
@pytest.mark.parametrize(
    ("tokens", "experts", "top_k", "rows"),
    [(3, 8, 2, 16), (40, 5, 3, 16), (170, 6, 3, 32), (400, 7, 2, 64)],
)
def test_sort(tokens, experts, top_k, rows, kind):
    ids, _ = random_choice(tokens, experts, top_k, kind)
    check_sorted(ids, experts, rows)


@pytest.mark.parametrize("kind", ("random", "holes"))
def test_sort_of_several_chunks(kind, monkeypatch):
    monkeypatch.setattr(sorting, "CHUNK", 512)
    ids, _ = random_choice(500, 6, 3, kind)
    check_sorted(ids, 6, 16)


def test_all_pairs_on_one_expert_and_none_at_all():
    found = check_sorted(torch.full((2100, 1), 2, dtype=torch.int32), 4, 16)
    assert (found.experts >= 0).sum() == 132
    assert (check_sorted(torch.full((9, 2), -1, dtype=torch.int32), 4, 16).experts == -1).all()


def test_the_bound_on_tiles_is_reached():
    ids = torch.tensor([0] * 17 + [1] * 17 + [2] * 1, dtype=torch.int32)[:, None]
    assert sorting.tile_bound(35, 3, 16) == 5
    assert (check_sorted(ids, 3, 16).experts >= 0).all()


def check(tokens, experts, top_k, hidden, inner, plan, kind="random", dtype=FP16, **options):
    """``plan`` None: as chosen."""
    w = Weights.random(experts, hidden, inner, dtype, **options)
    made = w.made(EXPERTS.call)
    made.plans = plan
    x, other = randn(tokens, hidden).to(dtype), randn(tokens, hidden, seed=1).to(dtype)
    ids, weights = random_choice(tokens, experts, top_k, kind)
    for added in (None, other):
        found = made(x, ids, weights, None if added is None else added.clone())
        assert found.dtype == dtype
        assert_close(found, w.expected(x, ids, weights, added), EXPERTS, dtype)
        if added is None:
            assert not found[(ids < 0).all(-1)].any()
    return made


PLANS = {
    "pairs": PAIRS,
    "swap-16": tiles(16),
    "swap-32": tiles(32, block_n=64, block_k=16),
    "plain-16": tiles(16, block_n=64, block_k=16, swap=False),
    "plain-64": tiles(64, swap=False),
}


@pytest.mark.parametrize("kind", ("random", "skewed", "holes"))
@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_experts(plan, kind):
    """Sizes that are no multiple of any tile."""
    check(5, 6, 2, 43, 26, plan, kind, bias=True)


@pytest.mark.parametrize("dtype", (FP16, BF16))
@pytest.mark.parametrize("activation", ("silu_mul", "swiglu_clamped"))
@pytest.mark.parametrize("bias", (False, True))
@pytest.mark.parametrize("plan", (PLANS["pairs"], PLANS["swap-16"]), ids=("pairs", "tiles"))
def test_activations_and_biases(plan, bias, activation, dtype):
    """Gate and up reach beyond the clamp."""
    check(2, 4, 3, 40, 16, plan, dtype=dtype, activation=activation, bias=bias, scale=4.0)


@pytest.mark.parametrize("tokens", (1, 3, 40))
def test_experts_as_chosen(tokens):
    check(tokens, 4, 2, 40, 24, None)


def test_several_tiles_of_one_expert():
    check(40, 4, 1, 32, 16, tiles(16, block_n=64), "skewed")


def test_tokens_do_not_depend_on_each_other():
    """Nor on where they lie in a tile."""
    made = check(20, 4, 2, 40, 24, tiles(16, block_n=64))
    x = randn(20, 40).half()
    ids, weights = random_choice(20, 4, 2)
    found = made(x, ids, weights)
    turned = torch.arange(19, -1, -1)
    assert torch.equal(made(x[turned], ids[turned], weights[turned]), found[turned])
    assert torch.equal(made(x, ids, weights), found)


def test_contiguous_weights_are_not_copied():
    w = Weights.random(4, 16, 8, FP16)
    made = w.made(EXPERTS.call)
    assert made.gate_up.data_ptr() == w.gate_up.data_ptr()
    assert made.down.data_ptr() == w.down.data_ptr()


def test_weights_that_do_not_belong_together_are_refused():
    w = Weights.random(4, 16, 8, FP16)
    with pytest.raises(ValueError, match=r"asks for \[4, 16, 16\]"):
        EXPERTS.call(w.gate_up[:, 2:], w.down)


def kind_of(tokens, top_k, experts, hopper=True):
    return plans.choose(tokens, top_k, experts, (2048, 768), hopper).up


def test_few_pairs_go_one_by_one_and_more_in_tiles():
    assert [isinstance(kind_of(t, 8, 128), plans.PairPlan) for t in (1, 4, 5)] == [
        True,
        True,
        False,
    ]
    assert [isinstance(kind_of(t, 2, 8), plans.PairPlan) for t in (1, 2)] == [True, False]
    assert [kind_of(t, 8, 128).block_m for t in (8, 64, 256, 512, 4096)] == [16, 16, 32, 64, 128]


def test_plans_fit_the_shared_memory_of_the_card():
    for tokens in (8, 256, 512, 4096):
        assert kind_of(tokens, 8, 128).shared_memory() <= 227 << 10
        assert kind_of(tokens, 8, 128, hopper=False).shared_memory() <= 99 << 10
