"""Triton's quantized experts against the definition in FP64, interpreted on small shapes."""

from __future__ import annotations

import pytest
import torch

from octavo.ops import moe, registry
from tests.ops.comparing import assert_close, randn
from tests.ops.quantized_kinds import Kinds

launch = pytest.importorskip("octavo.ops.triton.launch")
pytestmark = pytest.mark.skipif(not launch.INTERPRETED, reason="tests/gpu has them")

(VERSION,) = (v for v in registry.versions("moe_experts", "cuda") if v.name == "triton")
EXPERTS, HIDDEN, INNER, TOP_K = 5, 96, 48, 2
KINDS = {
    "4-bit": lambda kinds, n, k: kinds.even(n, k, 4, 32, "zeros"),
    "4-bit-order": lambda kinds, n, k: kinds.even(n, k, 4, 20, "minimums", order=True),
    "8-bit-channel": lambda kinds, n, k: kinds.even(n, k, 8, 65_536),
    "3-bit": lambda kinds, n, k: kinds.even(n, k, 3, 48),
    "table": lambda kinds, n, k: kinds.table(n, k, 4, 16, of_rows=True),
    "table-shared": lambda kinds, n, k: kinds.table(n, k, 4, 32),
    "float8": lambda kinds, n, k: kinds.float8(n, k, (0, 0)),
    "float8-block": lambda kinds, n, k: kinds.float8(n, k, (16, 32)),
}


def experts_of(make):
    gate_up = [make(Kinds(e), 2 * INNER, HIDDEN) for e in range(EXPERTS)]
    return gate_up, [make(Kinds(9 + e), HIDDEN, INNER) for e in range(EXPERTS)]


def check(gate_up, down, tokens, clamped=False, dtype=torch.bfloat16):
    activation = "swiglu_clamped" if clamped else "silu_mul"
    biases = ()
    if clamped:
        biases = (randn(EXPERTS, 2 * INNER, seed=5), randn(EXPERTS, HIDDEN, seed=6))
        biases = tuple(bias.to(dtype) for bias in biases)
    x, other = (randn(tokens, HIDDEN, seed=s).to(dtype) for s in (7, 8))
    ids = torch.stack([torch.randperm(EXPERTS)[:TOP_K] for _ in range(tokens)]).int()
    ids[0, 1] = -1
    weights = torch.rand(tokens, TOP_K)
    exact = [torch.stack([w.dense().double() for w in part]) for part in (gate_up, down)]
    definition = moe.experts(*exact, activation, *(bias.double() for bias in biases))
    expected = definition(x.double(), ids, weights, other.double())
    made = VERSION.call(list(gate_up), list(down), activation, *biases)
    found = made(x, ids, weights, other.clone())
    assert_close(found, expected, VERSION, dtype)


@pytest.mark.parametrize("tokens", (1, 30))
@pytest.mark.parametrize("name", KINDS)
def test_every_kind(name, tokens):
    check(*experts_of(KINDS[name]), tokens, clamped=name in ("4-bit", "table"))


def test_the_list_is_emptied_while_it_is_packed():
    gate_up, down = experts_of(KINDS["4-bit"])
    made = VERSION.call(gate_up, down)
    assert set(gate_up) == set(down) == {None}
    assert made.gate_up.packed.words.shape[0] == EXPERTS


def test_experts_are_of_one_kind():
    gate_up, down = experts_of(KINDS["4-bit"])
    other = KINDS["3-bit"](Kinds(), HIDDEN, INNER)
    with pytest.raises(ValueError, match=r"differ in kind: .*bits=4.* of the first, .*bits=3"):
        VERSION.call(list(gate_up), [*down[:-1], other])
    with pytest.raises(ValueError, match="some experts are quantized"):
        VERSION.call(list(gate_up), [*down[:-1], other.dense()])
