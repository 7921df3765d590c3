"""Guesses change nothing: not the ids, texts, ends or log-probabilities of any request.

One batch holds every kind of request. Whatever guesses, however many and however wrong, its answers
are those of an engine that guesses nothing; in FP32 log-probabilities are within 1e-4.
"""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from octavo import LLM, SamplingParams
from octavo.engine.messages import EngineStats
from octavo.engine.verify_cost import VerifyCosts
from octavo.outputs import CompletionOutput, RequestOutput
from octavo.types import StructuredOutputsParams
from octavo.worker import runner
from octavo.worker.slots import Slots
from octavo.worker.speculative.combine import make_proposer
from octavo.worker.speculative.proposer import Int32, Proposer

pytestmark = pytest.mark.usefixtures("guesses_are_free")
TOLERANCE = 1e-4
FEW = [101, 102, 103]  # a, b and c: what is drawn of three ids repeats itself: n-grams are found
SHAPE = {
    "type": "object",
    "properties": {"a": {"type": "boolean"}, "b": {"enum": [12, 345]}},
    "required": ["a"],
    "additionalProperties": False,
}
PROMPTS = [
    [0, 5, 6, 7],
    [0, *range(40, 90)],
    [0, *range(40, 79), 8, 9],  # a beginning like the one before
    [0, *[60, 61, 62, 63, 64] * 4],
]
# Kind of request -> its parameters; every one of them is seeded.
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0, "logprobs": 3},
    "greedy, scored": {"temperature": 0, "prompt_logprobs": 2},
    "cool": {"temperature": 0.7, "logprobs": 0},
    "hot": {"temperature": 1.5},
    "top-k": {"temperature": 0.9, "top_k": 5, "logprobs": 3},
    "top-p": {"temperature": 0.9, "top_p": 0.8},
    "min-p": {"temperature": 1.2, "min_p": 0.05, "top_k": 40, "top_p": 0.95},
    "penalties": {"temperature": 0.8, "presence_penalty": 0.5, "frequency_penalty": 0.4},
    "repetition": {"temperature": 0, "repetition_penalty": 1.4, "logprobs": 1},
    "bad words": {"temperature": 0, "bad_words": [" and", "is e", " e2"]},
    "least": {"temperature": 0, "min_tokens": 9, "logit_bias": {1: 100.0}},
    "bias": {"temperature": 1.0, "logit_bias": {50: 4.0, 51: 5.0, 52: -100.0}},
    "few ids": {"temperature": 0.8, "allowed_token_ids": FEW, "logprobs": 0},
    "few, greedy": {"temperature": 0, "allowed_token_ids": FEW, "max_tokens": 37},
    "few, punished": {"temperature": 0.5, "allowed_token_ids": FEW, "frequency_penalty": 0.1},
    "stop string": {"temperature": 2.0, "allowed_token_ids": [*FEW, 104], "stop": ["ad", "ca"]},
    "stop id": {"temperature": 2.0, "allowed_token_ids": [*FEW, 104], "stop_token_ids": [104]},
    "eos": {"temperature": 0.9, "allowed_token_ids": [*FEW, 1], "min_tokens": 4},
    "ignored eos": {"temperature": 0.9, "allowed_token_ids": [*FEW, 1], "ignore_eos": True},
    "three": {"temperature": 0.9, "n": 3, "logprobs": 0},
    "regex": {
        "temperature": 1.0,
        "logprobs": 1,
        "structured_outputs": StructuredOutputsParams(regex="[a-c]{3,14}z"),
    },
    "json": {
        "temperature": 0.8,
        "presence_penalty": 0.2,
        "structured_outputs": StructuredOutputsParams(json=SHAPE, disable_any_whitespace=True),
    },
}
REQUESTS = [
    SamplingParams(**{"max_tokens": 21, "seed": 100 * index, **params})
    for index, params in enumerate(KINDS.values())
]
ASKED = [PROMPTS[index % len(PROMPTS)] for index in range(len(REQUESTS))]
ALIKE = ("greedy", "cool", "hot", "top-k", "top-p", "min-p", "bias", "few ids", "three")


@pytest.fixture
def guesses_are_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as may be are made, whatever this machine measures."""
    monkeypatch.setattr(VerifyCosts, "seconds", lambda self, rows, guesses: np.ones(len(guesses)))


def engine(model: Path, **settings: Any) -> LLM:
    flags = {"dtype": "float32", "cpu_threads": 1, "max_model_len": 128, "max_num_seqs": 9}
    if "num_gpu_blocks_override" not in settings:
        flags["kv_cache_memory_bytes"] = 4 << 20
    return LLM(str(model), **{**flags, **settings})


def itself(model: Path, num_tokens: int, **more: Any) -> dict[str, Any]:
    """The model as its own draft."""
    return {
        "method": "draft_model",
        "model": str(model),
        "num_speculative_tokens": num_tokens,
        **more,
    }


def ask(llm: LLM) -> list[RequestOutput]:
    answers = llm.generate(ASKED, REQUESTS, use_tqdm=False)
    llm.engine.scheduler.check()
    stats = llm.stats
    assert stats.blocks_used == stats.num_running == stats.num_waiting == 0
    return answers


@pytest.fixture(scope="module")
def plain(model_r: Path) -> list[RequestOutput]:
    with closing(engine(model_r)) as llm:
        answers = ask(llm)
    ended = {name for name, answer in zip(KINDS, answers) if answer.outputs[0].stop_reason}
    assert ended == {"stop string", "stop id"}
    ended = {name for name, a in zip(KINDS, answers) if a.outputs[0].finish_reason == "stop"}
    assert ended >= {"least", "eos", "regex", "json", "stop string", "stop id"}
    return answers


def assert_same(found: list[RequestOutput], expected: list[RequestOutput]) -> None:
    for name, mine, theirs in zip(KINDS, found, expected):
        assert_close(name, mine.prompt_logprobs, theirs.prompt_logprobs)
        assert len(mine.outputs) == len(theirs.outputs)
        for one, other in zip(mine.outputs, theirs.outputs):
            assert seen(one) == seen(other), name
            assert_close(name, one.logprobs, other.logprobs)


def seen(output: CompletionOutput) -> tuple[Any, ...]:
    return output.token_ids, output.text, output.finish_reason, output.stop_reason


def assert_close(name: str, found: Any, expected: Any) -> None:
    assert (found is None) == (expected is None), name
    for mine, theirs in zip(found or [], expected or [], strict=True):
        assert (mine is None) == (theirs is None), name
        if mine is not None:
            assert list(mine) == list(theirs), name
            for token, entry in mine.items():
                assert abs(entry.logprob - theirs[token].logprob) < TOLERANCE, name
                assert entry.rank == theirs[token].rank, name


class ThirdWrong:
    """A proposer of whose guesses every third is another id."""

    def __init__(self, proposer: Proposer, vocab_size: int) -> None:
        self._proposer, self._vocab_size = proposer, vocab_size
        self.apply, self.computed = proposer.apply, proposer.computed

    def propose(self, slots: Int32, most: Int32) -> tuple[Int32, Int32]:
        counts, ids = self._proposer.propose(slots, most)
        ids[:, 2::3] = (ids[:, 2::3] + 7) % self._vocab_size
        return counts, ids


def spoiled(wanted: Any, slots: Slots, drafts: Any) -> Proposer:
    return ThirdWrong(make_proposer(wanted, slots, drafts), slots.vocab_size)


# Way of guessing -> settings; "draft": how many tokens the model itself guesses.
WAYS: dict[str, dict[str, Any]] = {
    "itself, twice": {"draft": 3},
    "itself, 1": {"draft": 1, "async_scheduling": False},
    "itself, 8, few blocks": {"draft": 8, "num_gpu_blocks_override": 14},
    "itself, chunks": {"draft": 5, "max_num_batched_tokens": 23, "block_size": 4},
    "third wrong": {"draft": 8, "spoiled": True},
    "third wrong, few blocks": {"draft": 3, "spoiled": True, "num_gpu_blocks_override": 12},
    "layers, twice": {"speculative_config": {"draft_layers": 1, "num_speculative_tokens": 3}},
    "layers, few blocks": {
        "speculative_config": {"draft_layers": 1, "num_speculative_tokens": 8},
        "num_gpu_blocks_override": 14,
        "async_scheduling": False,
    },
    "ngram": {"spec_method": "ngram", "num_speculative_tokens": 8},
    "ngram, few small blocks": {
        "speculative_config": {"method": "ngram", "prompt_lookup_min": 1},
        "block_size": 4,
        "num_gpu_blocks_override": 40,
    },
    "suffix": {"spec_method": "suffix", "max_num_seqs": 5},
    "ngram, else itself": {"draft": 3, "method": "ngram+draft_model"},
}


@pytest.mark.parametrize("way", WAYS)
def test_answers_are_those_without_guesses(
    way: str, plain: list[RequestOutput], model_r: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = dict(WAYS[way])
    if settings.pop("spoiled", False):
        monkeypatch.setattr(runner, "make_proposer", spoiled)
    if num_tokens := settings.pop("draft", 0):
        method = settings.pop("method", "draft_model")
        settings["speculative_config"] = itself(model_r, num_tokens, method=method)
    with closing(engine(model_r, **settings)) as llm:
        assert_same(ask(llm), plain)
        if "twice" in way:  # from a warm cache
            assert_same(ask(llm), plain)
        stats = llm.stats
    assert 0 < stats.num_accepted_drafts < stats.num_draft_tokens
    assert (stats.num_preemptions > 0) == ("num_gpu_blocks_override" in settings)
    check_places(stats)


def check_places(stats: EngineStats) -> None:
    assert sum(stats.drafted_at) == stats.num_draft_tokens
    assert sum(stats.accepted_at) == stats.num_accepted_drafts
    assert stats.drafted_at[0] == stats.num_drafts
    assert stats.drafted_at == sorted(stats.drafted_at, reverse=True)
    assert stats.accepted_at == sorted(stats.accepted_at, reverse=True)


@pytest.mark.parametrize("num_tokens", [1, 8])
def test_all_guesses_of_the_model_itself_are_right(model_r: Path, num_tokens: int) -> None:
    """Greedy or drawn: it guesses with the noise of the draws."""
    kinds = [KINDS[name] for name in ALIKE]
    params = [SamplingParams(max_tokens=24, seed=index, **kind) for index, kind in enumerate(kinds)]
    prompts = [PROMPTS[index % 4] for index in range(len(params))]
    with closing(engine(model_r, speculative_config=itself(model_r, num_tokens))) as llm:
        for _ in range(2):
            llm.generate(prompts, params, use_tqdm=False)
        stats = llm.stats
    assert stats.num_draft_tokens == stats.num_accepted_drafts > 200
    check_places(stats)
