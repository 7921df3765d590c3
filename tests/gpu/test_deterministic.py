"""--deterministic on a GPU: equal bits, alone or in any batch, however a prompt comes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from octavo import LLM
from octavo.ops import registry
from octavo.ops.attention import AttentionGeometry
from octavo.ops.triton import launch
from octavo.worker.device_sampler import log_softmax
from octavo.worker.graphs import Graphs
from tests.exactness.same_bits import (
    NUM_TOKENS,
    PARAMS,
    PROMPTS,
    Facts,
    engine,
    facts,
    write_checkpoint,
)
from tests.ops.batch_invariance import assert_rows_alike, assert_tokens_alike

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.skipif(
        torch.cuda.is_available() and not launch.has_one_product(), reason="refused on this GPU"
    ),
]
FP16, BF16 = torch.float16, torch.bfloat16


def version(op: str) -> Any:
    return registry.runnable(op, "cuda", BF16, deterministic=True)[-1].call


def randn(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(*shape, device="cuda", generator=generator).to(dtype)


# ---- operations ----

LINEARS = {  # outputs, columns, epilogue
    "llama-8b-qkv": (6144, 4096, "none"),
    "llama-8b-down": (4096, 14336, "add"),
    "0.6b-gate-up": (3072, 1024, "silu_mul"),
    "head": (50257, 768, "logits"),
    "odd": (963, 1096, "add"),
}
# Every size of tiles, with their edges; rows at other places than in the whole.
PARTS = [
    *((1, 0), (1, 1999), (2, 5), (3, 130), (17, 50), (63, 1), (64, 9), (65, 100)),
    *((128, 3), (129, 7), (200, 1000), (1000, 33)),
]


@pytest.mark.parametrize("dtype", (BF16, FP16))
@pytest.mark.parametrize(("n", "k", "epilogue"), LINEARS.values(), ids=LINEARS)
@torch.inference_mode()
def test_a_row_is_the_same_among_any_rows_and_at_any_place(n, k, epilogue, dtype):
    parts = 2 if epilogue == "silu_mul" else 1
    weights = [randn(n, k, dtype=dtype, seed=s) * k**-0.5 for s in range(parts)]
    linear = version("linear")(weights, randn(parts * n, dtype=dtype, seed=3), epilogue)
    x = randn(2000, k, dtype=dtype, seed=4)
    other = randn(2000, n, dtype=dtype, seed=5) if epilogue == "add" else None
    assert_rows_alike(linear, x, other, PARTS)


@pytest.mark.parametrize("epilogue", ("none", "add", "silu_mul", "logits"))
@torch.inference_mode()
def test_linears_are_right(epilogue):
    n, k = 1000, 2056
    parts = 2 if epilogue == "silu_mul" else 1
    weights = [randn(n, k, dtype=BF16, seed=s) * k**-0.5 for s in range(parts)]
    linear = version("linear")(weights, None, epilogue)
    for rows in (1, 64, 65, 3000):
        x = randn(rows, k, dtype=BF16, seed=rows)
        y = x.double() @ torch.cat(weights).double().t()
        if epilogue == "silu_mul":
            gate, up = y.chunk(2, dim=-1)
            y = torch.nn.functional.silu(gate) * up
        other = randn(rows, n, dtype=BF16, seed=5) if epilogue == "add" else None
        y = y if other is None else y + other.double()
        error = (linear(x, other).double() - y).abs().max() / y.abs().max()
        assert error <= (1e-5 if epilogue == "logits" else 0.005), f"{rows} rows: {error:.1e}"


@pytest.mark.parametrize("size", (576, 1096, 4096))
@torch.inference_mode()
def test_a_row_is_normed_the_same_among_any_rows(size):
    x, weight = randn(300, size, dtype=BF16), randn(size, dtype=BF16, seed=1)
    norm = version("rms_norm")
    whole = norm(x, weight, 1e-5)
    for rows, start in ((1, 0), (1, 299), (2, 7), (64, 3), (65, 100), (200, 50)):
        assert torch.equal(norm(x[start : start + rows], weight, 1e-5), whole[start : start + rows])


@pytest.mark.parametrize("vocab", (1000, 2051, 50257, 128256))
@torch.inference_mode()
def test_log_probabilities_do_not_depend_on_the_rows_place(vocab):
    logits = randn(70, vocab, dtype=torch.float32)
    whole = log_softmax(logits)
    for rows, start in ((1, 0), (1, 1), (1, 2), (1, 3), (7, 5), (64, 6)):
        part = slice(start, start + rows)
        assert torch.equal(log_softmax(logits[part].contiguous()), whole[part])


GEOMETRIES = {
    "32/8-128": AttentionGeometry(32, 8, 128),
    "16/8-128-norm": AttentionGeometry(16, 8, 128, qk_norm_eps=1e-6),
    "9/3-64": AttentionGeometry(9, 3, 64),
    "28/4-128-window": AttentionGeometry(28, 4, 128, window=100),
    "4/4-80": AttentionGeometry(4, 4, 80),
    "8/4-256-window": AttentionGeometry(8, 4, 256, window=77),
}


@pytest.mark.parametrize("dtype", (BF16, FP16))
@pytest.mark.parametrize("geometry", GEOMETRIES.values(), ids=GEOMETRIES)
@torch.inference_mode()
def test_a_token_attends_the_same_however_its_prompt_comes(geometry, dtype):
    """The sizes of values differ by up to 2^20, so that a product with a weight of 0 that left a
    trace in a sum would show."""
    length = 200
    heads = geometry.num_heads + 2 * geometry.num_kv_heads
    rows = randn(4, length, heads, geometry.head_dim, dtype=torch.float32)
    sizes = randn(4, length, geometry.num_kv_heads, 1, dtype=torch.float32, seed=1)
    rows[:, :, -geometry.num_kv_heads :] *= torch.exp2((sizes * 4).clamp(-10, 10).round())
    rows = rows.flatten(2).to(dtype)
    weight = None
    if geometry.qk_norm_eps is not None:
        weight = randn(heads - geometry.num_kv_heads, geometry.head_dim, dtype=dtype, seed=2)
    ways = (
        ([7] * 28 + [4], rows[:0]),
        ([64] * 3 + [8], rows[1:]),
        ([130] + [1] * 70, rows[1:]),
        ([1, 63, 1, 1, 125, 9], rows[1:2]),
    )
    for block_size in (16, 64):
        assert_tokens_alike(version("paged_attention")(geometry), rows[0], weight, ways, block_size)


# ---- the engine ----

WAYS: dict[str, dict[str, Any]] = {
    "a batch of 40": {},
    "chunks of 7": {"long_prefill_token_threshold": 7},
    "64 tokens a step": {"max_num_batched_tokens": 64},
    "100 blocks": {"kv_cache_memory_bytes": None, "num_gpu_blocks_override": 100},
    "no graphs": {"enforce_eager": True},
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("deterministic"))


@pytest.fixture(scope="module")
def alone(checkpoint: Path) -> Iterator[LLM]:
    """An engine without graphs and without a prefix cache, for one request at a time."""
    with engine(checkpoint, enable_prefix_caching=False, enforce_eager=True) as llm:
        assert llm.info.implementations["linear"] == "triton-fixed"
        assert llm.info.implementations["paged_attention"] == "triton-fixed"
        yield llm


@pytest.fixture(scope="module")
def expected(alone: LLM) -> list[Facts]:
    return [
        facts(alone.generate(prompt, params, use_tqdm=False)[0])
        for prompt, params in zip(PROMPTS, PARAMS)
    ]


@pytest.mark.parametrize("way", WAYS)
def test_log_probabilities_are_the_same_bits(way, checkpoint, expected):
    with engine(checkpoint, **WAYS[way]) as llm:
        cold = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
        assert [facts(output) for output in cold] == expected
        warm = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
        assert [facts(output) for output in warm] == expected
        stats = llm.stats
    assert stats.prefix_hits > 0
    assert (stats.num_preemptions > 0) == (way == "100 blocks")


def test_graphs_leave_the_same_bits_in_the_cache(checkpoint, alone, expected, monkeypatch):
    """Rows that report log-probabilities are not replayed, so others write the cache by replays,
    and it is reused by prompts that go on where they ended."""
    replayed = []
    run = Graphs.run

    def counted(self, shape):
        run(self, shape)
        if shape in self._captured:
            replayed.append(shape)

    monkeypatch.setattr(Graphs, "run", counted)
    silent = [params.clone(logprobs=None) for params in PARAMS]
    with engine(checkpoint, long_prefill_token_threshold=16) as llm:
        for _ in range(3):  # steps with prompts are captured when their shape comes again
            llm.reset_prefix_cache()
            outputs = llm.generate(PROMPTS, silent, use_tqdm=False)
            found = [output.outputs[0].token_ids for output in outputs]
            assert found == [[token for token, _ in one] for one in expected]
        assert any(shape.prompt_rows for shape in replayed)
        assert sum(not shape.prompt_rows for shape in replayed) >= 2 * (NUM_TOKENS - 4)
        longer = [prompt + tokens for prompt, tokens in zip(PROMPTS, found)]
        again = llm.generate(longer, PARAMS, use_tqdm=False)
    assert sum(o.num_cached_tokens > len(p) for o, p in zip(again, PROMPTS)) >= 30
    for prompt, params, output in zip(longer, PARAMS, again):
        (exact,) = alone.generate(prompt, params, use_tqdm=False)
        assert facts(output) == facts(exact)
