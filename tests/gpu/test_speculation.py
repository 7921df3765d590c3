"""Speculation on a GPU: with ``--deterministic``, where a token does not depend on how many are
computed at once, answers are those without it, whatever is guessed."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from octavo import LLM, SamplingParams
from octavo.types import ConfigError
from tests.fixtures import models

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

PROMPTS = [[0, *([17 + i, 40 + i, 99, 23 + 2 * i] * 6)[: 5 + 3 * i]] for i in range(6)]
WAYS: dict[str, dict[str, Any]] = {
    "graphs": {},
    "eager": {"enforce_eager": True},
    "no overlap": {"async_scheduling": False},
    "few blocks": {"num_gpu_blocks_override": 18, "block_size": 16},
    "1 guess": {"num_speculative_tokens": 1},
    "8 guesses": {"num_speculative_tokens": 8},
}


def answers(model: str, **settings: Any) -> tuple[list[Any], Any]:
    base = {"max_model_len": 256, "deterministic": True, "kv_cache_memory_bytes": 64 << 20}
    if "num_gpu_blocks_override" in settings:
        del base["kv_cache_memory_bytes"]
    found = []
    with closing(LLM(model, **{**base, **settings})) as llm:
        for batch in (PROMPTS, PROMPTS[:1]):
            for params in (
                {"temperature": 0},
                {"temperature": 0.4, "top_p": 0.9, "seed": 3},
                {"temperature": 0, "repetition_penalty": 1.05},
                {"temperature": 0, "logprobs": 1},
            ):
                asked = SamplingParams(max_tokens=80, ignore_eos=True, **params)
                outputs = llm.generate(batch, asked, use_tqdm=False)
                found += [list(output.outputs[0].token_ids) for output in outputs]
        return found, llm.stats


@pytest.fixture(scope="module")
def plain() -> list[Any]:
    return answers(str(models.path("L64")))[0]


@pytest.mark.parametrize("way", WAYS)
def test_answers_are_those_without(way: str, plain: list[Any]) -> None:
    settings = {"spec_method": "ngram", "num_speculative_tokens": 5, **WAYS[way]}
    found, stats = answers(str(models.path("L64")), **settings)
    assert found == plain
    assert stats.num_draft_tokens > 20 and stats.num_accepted_drafts > 10, stats
    assert stats.blocks_used == 0


def test_methods_that_are_not_there_are_refused() -> None:
    with pytest.raises(ConfigError, match="suffix on a GPU: there is ngram alone"):
        LLM(str(models.path("L64")), spec_method="suffix")
