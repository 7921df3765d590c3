"""Engines of several ranks guess alike: their ids are those of one rank that guesses nothing. The
ranks are threads (``ranks``), and assert that all of the last stage have drawn the same."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from octavo import LLM, SamplingParams
from octavo.engine import start
from octavo.engine.verify_cost import VerifyCosts
from octavo.speculation import Speculating, check_stages
from octavo.types import ConfigError, StructuredOutputsParams
from tests.parallel.test_engines import threads

pytestmark = pytest.mark.usefixtures("one_thread")
FEW = [101, 102, 103]  # what is drawn of three ids repeats itself: n-grams are found
PROMPTS = [[0, *range(40, 40 + count)] for count in (3, 30, 17, 31, 9)]
REQUESTS = [
    SamplingParams(max_tokens=17, seed=7 * index, **kind)
    for index, kind in enumerate(
        (
            {"temperature": 0},
            {"temperature": 0, "allowed_token_ids": FEW},
            {"temperature": 0.8, "allowed_token_ids": FEW, "top_p": 0.95},
            {"temperature": 1.0, "frequency_penalty": 0.2, "allowed_token_ids": FEW},
            {
                "temperature": 0.9,
                "structured_outputs": StructuredOutputsParams(regex="(ab|ca){2,6}z"),
            },
        )
    )
]


@pytest.fixture(autouse=True)
def guesses_are_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as may be are made, whatever this machine measures."""
    monkeypatch.setattr(VerifyCosts, "seconds", lambda self, rows, guesses: np.ones(len(guesses)))


def ids(path: Path, **settings: Any) -> list[list[int]]:
    flags = {"dtype": "float32", "cpu_threads": 1, "max_model_len": 64, "block_size": 4}
    with closing(LLM(str(path), num_gpu_blocks_override=20, **flags, **settings)) as llm:
        found = [
            answer.outputs[0].token_ids
            for _ in range(2)  # the second time from a warm cache
            for answer in llm.generate(PROMPTS, REQUESTS, use_tqdm=False)
        ]
        stats = llm.stats
    if "speculative_config" in settings:
        assert 0 < stats.num_accepted_drafts < stats.num_draft_tokens
        assert stats.num_preemptions > 0
    return found


@pytest.fixture(scope="module")
def alone(model_r: Path) -> list[list[int]]:
    return ids(model_r)


@pytest.mark.parametrize(
    ("config", "tp", "pp"),
    [
        ({"method": "draft_model"}, 2, 1),
        ({"draft_layers": 1, "num_speculative_tokens": 2}, 2, 1),
        ({"method": "suffix"}, 2, 1),
        ({"method": "ngram", "prompt_lookup_min": 1}, 1, 2),
        ({"method": "ngram", "prompt_lookup_min": 1, "num_speculative_tokens": 3}, 2, 2),
    ],
    ids=lambda value: value.get("method", "draft_layers") if isinstance(value, dict) else value,
)
def test_ids_are_those_of_one_rank_without_guesses(
    config: dict[str, Any],
    tp: int,
    pp: int,
    alone: list[list[int]],
    model_r: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if config.get("method") == "draft_model":
        config = {**config, "model": str(model_r)}
    monkeypatch.setattr(start, "start_executor", threads)
    sizes = {"tensor_parallel_size": tp, "pipeline_parallel_size": pp}
    assert ids(model_r, speculative_config=config, **sizes) == alone


def test_stages_guess_by_ngrams_alone(model_r: Path) -> None:
    with pytest.raises(ConfigError, match=r"suffix with --pipeline-parallel-size 2: .* or -tp"):
        LLM(str(model_r), spec_method="suffix", pipeline_parallel_size=2)
    for method in ("draft_layers", "draft_model", "ngram+draft_layers", "suffix+draft_model"):
        check_stages(wanted := Speculating(tuple(method.split("+"))), 1)
        with pytest.raises(ConfigError, match="with several stages there is ngram alone"):
            check_stages(wanted, 2)
    check_stages(Speculating(("ngram",)), 4)
    check_stages(None, 2)
