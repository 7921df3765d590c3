"""Constraints on a GPU: the mask's kernel at full size, and engines whose every answer is checked.

The same requests as on a CPU (tests/grammar/test_offline.py). ``-s`` shows how many answers were
whole, and what a step under constraints costs.
"""

from __future__ import annotations

import time
from contextlib import closing
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from octavo import LLM, SamplingParams, StructuredOutputsParams
from octavo.ops import masks
from octavo.ops.triton import launch
from octavo.ops.triton.masks import keep_allowed
from tests.fixtures import models
from tests.grammar import offline

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
FLAGS = {"max_model_len": 256, "kv_cache_memory_bytes": 32 << 20, "max_num_seqs": 48}


@pytest.mark.parametrize("vocab", [128256, 151936, 50257, 320])
@pytest.mark.parametrize("rows", [1, 7, 256])
@torch.inference_mode()
def test_the_kernel_is_the_definition(vocab: int, rows: int) -> None:
    generator = torch.Generator("cuda").manual_seed(vocab)
    logits = torch.randn(rows, vocab, device="cuda", generator=generator)
    random = np.random.default_rng(vocab + rows)
    count = max(1, rows // 2)
    words = random.integers(-(2**31), 2**31, (count, -(-vocab // 32)), dtype=np.int64)
    held = torch.from_numpy(words.astype(np.int32)).cuda()
    index = torch.from_numpy(random.integers(-1, count, rows).astype(np.int32)).cuda()
    expected = logits.clone()
    masks.keep_allowed(expected, index, held)
    keep_allowed(logits, index, held)
    assert torch.equal(logits, expected)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("model", ["L64", "Q128", "R-bf16"])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"enforce_eager": True},
        {"async_scheduling": False},
        {"num_gpu_blocks_override": 24, "block_size": 16, "max_num_seqs": 16},
        {"max_num_batched_tokens": 9, "max_num_seqs": 5},
    ],
    ids=["default", "eager", "no-overlap", "few-blocks", "small-steps"],
)
def test_every_answer_matches_its_constraint(model: str, settings: dict[str, Any]) -> None:
    flags = {**FLAGS, **settings}
    if "num_gpu_blocks_override" in settings:
        del flags["kv_cache_memory_bytes"]
    with closing(LLM(str(models.path(model)), **flags)) as llm:
        for _ in range(3):  # enqueued kernel by kernel, captured, replayed
            num_whole = offline.check_answers(offline.together(llm, 320))
            print(f"{model} {settings}: {num_whole} whole answers")
            assert num_whole > 9
        if "num_gpu_blocks_override" in settings:
            assert llm.stats.num_preemptions > 0
        llm.engine.scheduler.check()
        assert llm.engine.grammars.num_used == 0
        forwards = llm.executor._runner.forwards  # type: ignore[union-attr]
        if "enforce_eager" not in settings:
            assert forwards is not None and len(forwards._captured) > 0


@pytest.mark.timeout(600)
@pytest.mark.skipif(
    torch.cuda.is_available() and not launch.has_one_product(), reason="refused on this GPU"
)
def test_company_changes_nothing_where_bits_do_not_depend_on_it() -> None:
    flags = {**FLAGS, "deterministic": True}
    with closing(LLM(str(models.path("L64")), enable_prefix_caching=False, **flags)) as llm:
        alone = offline.one_by_one(llm, 320)
        company = offline.together(llm, 320)
    assert offline.tokens(company) == offline.tokens(alone)


@pytest.mark.timeout(600)
def test_what_a_step_under_constraints_costs() -> None:
    """No judgement: printed for people. Every row draws digits for ever."""
    endless = StructuredOutputsParams(regex="[0-9 ]+")
    free = SamplingParams(temperature=1.0, max_tokens=200, ignore_eos=True, seed=1)
    bound = free.clone(structured_outputs=endless)
    flags = {**FLAGS, "max_num_seqs": 64, "kv_cache_memory_bytes": 1 << 30}
    with closing(LLM(str(models.path("G-bf16")), **flags)) as llm:
        for rows in (1, 16, 64):
            prompts = [[5, 6, 7]] * rows
            for name, params in (("free", free), ("constrained", bound)):
                llm.generate(prompts, params, use_tqdm=False)
                began = time.perf_counter()
                answers = llm.generate(prompts, params, use_tqdm=False)
                seconds = time.perf_counter() - began
                print(f"{rows} rows, {name}: {seconds / 200 * 1e3:.2f} ms a token")
                if name == "constrained":
                    assert all(set(a.outputs[0].text) <= set("0123456789 ") for a in answers)
