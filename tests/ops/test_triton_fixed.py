"""What --deterministic computes with: right, and equal bit for bit in any batch. Interpreted."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from octavo.ops import registry
from octavo.ops.attention import AttentionGeometry
from octavo.ops.triton import fixed_attention, launch
from octavo.ops.triton import fixed_linear as module
from octavo.ops.triton.fixed_attention import FixedPagedAttention
from tests.fixtures.triton_interpreter import products_in_order
from tests.ops.batch_invariance import assert_rows_alike, assert_tokens_alike
from tests.ops.comparing import assert_close, expected_linear, randn

pytestmark = pytest.mark.skipif(not launch.INTERPRETED, reason="tests/gpu has them")

(VERSION,) = (v for v in registry.versions("linear", "cuda") if v.name == "triton-fixed")
FP16, BF16 = torch.float16, torch.bfloat16
EPILOGUES = ("none", "add", "silu_mul", "logits")
N, K = 75, 136  # no multiple of any tile


def linear_of(epilogue, dtype, bias, n=N, k=K):
    """The linear, its weights and its bias."""
    parts = 2 if epilogue == "silu_mul" else 1
    weights = [(randn(n, k, seed=s) / 10).to(dtype) for s in range(1, 1 + parts)]
    shift = randn(parts * n, seed=3).to(dtype) if bias else None
    return module.FixedLinear(weights, shift, epilogue), weights, shift


@pytest.fixture(params=(1, 1000), ids=("pairs", "single"))
def processors(request, monkeypatch):
    """So many want a program: two tiles of outputs in each, or one."""
    monkeypatch.setattr(module, "PROCESSORS", request.param)


@pytest.mark.parametrize("epilogue", EPILOGUES)
@pytest.mark.parametrize(("rows", "dtype"), ((1, FP16), (65, BF16)))
def test_linear(rows, dtype, epilogue, processors):
    linear, weights, shift = linear_of(epilogue, dtype, bias=rows > 1)
    x = randn(rows, K).to(dtype)
    other = randn(rows, N, seed=4).to(dtype) if epilogue == "add" else None
    found = linear(x, other)
    assert found.dtype == (torch.float32 if epilogue == "logits" else dtype)
    expected = expected_linear(weights, shift, epilogue, x, other)
    assert_close(found, expected, VERSION, dtype)


@pytest.mark.parametrize("epilogue", ("none", "silu_mul"))
@pytest.mark.parametrize(("rows", "n", "k"), ((3, 1, 8), (2, 128, 64), (1100, 5, 16)))
def test_linear_of_unusual_sizes(rows, n, k, epilogue):
    linear, weights, shift = linear_of(epilogue, FP16, True, n, k)
    x = randn(rows, k).to(FP16)
    assert_close(linear(x), expected_linear(weights, shift, epilogue, x), VERSION, FP16)
    assert linear(x[:0]).shape == (0, n)


@pytest.mark.parametrize("epilogue", EPILOGUES)
def test_a_row_is_the_same_among_any_rows_and_at_any_place(epilogue, monkeypatch):
    linear, _, _ = linear_of(epilogue, FP16, bias=True)
    x = randn(200, K).to(FP16)
    other = randn(200, N, seed=4).to(FP16) if epilogue == "add" else None
    parts = ((1, 0), (1, 77), (3, 130), (17, 50), (64, 9), (65, 100))
    with products_in_order():
        assert_rows_alike(linear, x, other, parts)
        whole = linear(x, other)
        monkeypatch.setattr(module, "PROCESSORS", 1)
        assert torch.equal(linear(x, other), whole)


GEOMETRIES = {
    "gqa3-80-norm": (AttentionGeometry(3, 1, 80, qk_norm_eps=1e-6), 64),
    "gqa5-32-window": (AttentionGeometry(5, 1, 32, window=20), 16),
}


@pytest.mark.parametrize(("geometry", "block_size"), GEOMETRIES.values(), ids=GEOMETRIES)
def test_a_token_attends_the_same_however_its_prompt_comes(geometry, block_size, monkeypatch):
    """With small tiles, so that a few tokens cross their borders."""
    length = 40
    heads = geometry.num_heads + 2 * geometry.num_kv_heads
    rows = randn(2, length, heads * geometry.head_dim).to(FP16)
    weight = None
    if geometry.qk_norm_eps is not None:
        weight = randn(heads - geometry.num_kv_heads, geometry.head_dim, seed=2).to(FP16)
    config = replace(fixed_attention.fixed_config(geometry), rows=16, tile=16)
    monkeypatch.setattr(fixed_attention, "fixed_config", lambda geometry: config)
    attention = FixedPagedAttention(geometry)
    ways = (([7] * 5 + [5], rows[:0]), ([30] + [1] * 10, rows[1:]))
    with products_in_order():
        assert_tokens_alike(attention, rows[0], weight, ways, block_size)
