"""A GPU's answers are the oracle's up to near-ties, in whatever way they are computed.

Small random checkpoints; the oracle (FP32, no cache, no batch) recomputes every token, so each is
judged given those before it: greedy ones, seeded ones, with penalties, edits and truncation. A
token that logits within ERROR of the oracle's would not draw is a fault; the others are counted.
``-s`` shows the counts of each way of running.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from octavo import LLM, SamplingParams
from octavo.outputs import CompletionOutput, RequestOutput
from octavo.worker import device
from tests.exactness.law import EOS, Law, Verdict
from tests.fixtures import models
from tests.fixtures.oracle import oracle

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

# How far a logit may be off; they have a spread of 3. Measured on a CPU in BF16: 0.1.
ERROR = {"bfloat16": 0.25, "float16": 0.04, "float32": 1e-3}
NEAR_TIES = {"bfloat16": 0.06, "float16": 0.02, "float32": 0.002}  # of all tokens, at most
# Way of running -> settings. Every check below is made under each of them.
WAYS: dict[str, dict[str, Any]] = {
    "default": {},
    "eager": {"enforce_eager": True},
    "no overlap": {"async_scheduling": False},
    "no overlap, eager": {"async_scheduling": False, "enforce_eager": True},
    "7 tokens a step": {"max_num_batched_tokens": 7},
    "64 tokens a step": {"max_num_batched_tokens": 64},
    "chunks of 7": {"long_prefill_token_threshold": 7},
    "whole prompts": {"enable_chunked_prefill": False},
    "blocks of 16": {"block_size": 16},
    "blocks of 128": {"block_size": 128},
    "one at a time": {"max_num_seqs": 1},
    "8 at once": {"max_num_seqs": 8},
    "no prefix cache": {"enable_prefix_caching": False},
    "few blocks": {"num_gpu_blocks_override": 18, "block_size": 16},
    "n-grams": {"spec_method": "ngram"},
    "n-grams, few blocks, eager": {
        "spec_method": "ngram",
        "num_gpu_blocks_override": 18,
        "block_size": 16,
        "enforce_eager": True,
    },
    "few blocks, eager, chunks of 7": {
        "num_gpu_blocks_override": 18,
        "block_size": 16,
        "enforce_eager": True,
        "long_prefill_token_threshold": 7,
    },
}
SOME = ("default", "eager", "7 tokens a step", "blocks of 16", "blocks of 128", "few blocks")
RUNS = [
    *(("L64", "bfloat16", way) for way in WAYS),
    *(("Q128", "bfloat16", way) for way in SOME),
    *(("L64", "float16", way) for way in ("default", "few blocks")),
    *((model, dtype, "default") for model, dtype in (("Q128", "float16"), ("R-bf16", "bfloat16"))),
]


def make_prompts() -> list[list[int]]:
    """40 of lengths around block boundaries; a third share a beginning that ends in mid-block."""
    rng = random.Random(20261130)
    stem = [0, *(rng.randrange(4, 320) for _ in range(75))]
    lengths = (1, 2, 15, 16, 17, 31, 33, 63, 64, 65, 90, 127, 128, 129)
    alone = [*lengths, *(rng.randint(3, 40) for _ in range(13))]
    shared = (1, 2, 5, 9, 17, 23, 24, 33, 40, 52, 53, 60, 61)
    prompts = [[0, *(rng.randrange(4, 320) for _ in range(n - 1))] for n in alone]
    return prompts + [stem + [rng.randrange(4, 320) for _ in range(n)] for n in shared]


PROMPTS = make_prompts()
GREEDY = SamplingParams(temperature=0, max_tokens=24)
REPORTED = GREEDY.clone(logprobs=5, max_tokens=12)
FORKED = SamplingParams(temperature=1.0, top_k=40, max_tokens=12, seed=400, n=4)
# One each, turn about, all in one batch.
MIXTURE = [
    SamplingParams(temperature=0.9, top_p=0.95),
    SamplingParams(temperature=1.3, top_k=12),
    SamplingParams(temperature=0.8, min_p=0.08, presence_penalty=0.6),
    SamplingParams(temperature=0.0, repetition_penalty=1.2, frequency_penalty=0.3),
    SamplingParams(temperature=1.0, top_k=30, top_p=0.8, repetition_penalty=0.9),
    SamplingParams(temperature=0.0),
]
EDITED = [
    SamplingParams(temperature=0.0, logit_bias={EOS: 30.0, 40: 2.0, 41: -3.0}, min_tokens=5),
    SamplingParams(temperature=1.0, allowed_token_ids=list(range(20, 60)), logprobs=2),
    SamplingParams(temperature=0.7, bad_words=["a", "e", "th", "the", " o", "in"], logprobs=0),
    SamplingParams(temperature=0.0, min_tokens=6, stop_token_ids=list(range(0, 320, 3))),
    *MIXTURE,
]


def turn_about(kinds: list[SamplingParams], count: int) -> list[SamplingParams]:
    return [
        kinds[index % len(kinds)].clone(max_tokens=20, seed=10_000 + 10 * index)
        for index in range(count)
    ]


@contextmanager
def engine(model: Path, dtype: str, **settings: Any) -> Iterator[LLM]:
    flags = {"max_model_len": 224, "max_num_seqs": 48, "kv_cache_memory_bytes": 32 << 20}
    if "num_gpu_blocks_override" in settings:
        del flags["kv_cache_memory_bytes"]
    with closing(LLM(str(model), dtype=dtype, **{**flags, **settings})) as llm:
        yield llm


@dataclass
class Run:
    """What one way of running gave: rounds of prompts, and the engine's counts at the end."""

    greedy: list[RequestOutput]
    warm: list[RequestOutput]
    reported: list[RequestOutput]
    mixture: list[RequestOutput]
    edited: list[RequestOutput]
    forked: list[RequestOutput]
    bad_words: dict[int, list[list[int]]] = field(default_factory=dict)
    stats: Any = None


def run(model: Path, dtype: str, **settings: Any) -> Run:
    with engine(model, dtype, **settings) as llm:

        def ask(count: int, params: Any) -> list[RequestOutput]:
            return llm.generate(PROMPTS[-count:], params, use_tqdm=False)

        params = EDITED_PARAMS
        bad_words = {
            index: llm.tokenizer.bad_word_ids(each.bad_words)
            for index, each in enumerate(params)
            if each.bad_words and llm.tokenizer is not None
        }
        forked = FORKED.clone(n=min(FORKED.n, llm.info.max_num_seqs))
        found = Run(
            ask(40, GREEDY), ask(20, GREEDY), ask(20, REPORTED), ask(40, MIXTURE_PARAMS),
            ask(20, params), ask(4, forked), bad_words,
        )  # fmt: skip
        llm.engine.scheduler.check()
        found.stats = llm.stats
    assert found.stats.blocks_used == found.stats.num_running == found.stats.num_waiting == 0
    return found


MIXTURE_PARAMS, EDITED_PARAMS = turn_about(MIXTURE, 40), turn_about(EDITED, 20)


def judge(found: Run, law: Law) -> Verdict:
    """Of every token of every round."""
    greedy, edited = [GREEDY] * len(PROMPTS), found.edited
    verdict = Verdict()
    for answers, params in (
        (found.greedy, greedy),
        (found.warm, greedy),
        (found.reported, [REPORTED] * len(PROMPTS)),
        (found.mixture, MIXTURE_PARAMS),
    ):
        for prompt, answer, asked in zip(PROMPTS[-len(answers) :], answers, params):
            verdict += law.judge(prompt, answer.outputs[0].token_ids, asked)
    for index, (prompt, answer) in enumerate(zip(PROMPTS[-len(edited) :], edited)):
        bad_words, asked = found.bad_words.get(index, ()), EDITED_PARAMS[index]
        verdict += law.judge(prompt, answer.outputs[0].token_ids, asked, bad_words=bad_words)
    for prompt, answer in zip(PROMPTS[-len(found.forked) :], found.forked):
        for choice in answer.outputs:
            verdict += law.judge(prompt, choice.token_ids, FORKED, choice.index)
    return verdict


def check_ends(answers: list[RequestOutput], params: list[SamplingParams]) -> None:
    for answer, asked in zip(answers, params):
        for output in answer.outputs:
            stops = {EOS, *(asked.stop_token_ids or ())}
            stopped = [index for index, token in enumerate(output.token_ids) if token in stops]
            if output.finish_reason == "stop":
                assert stopped[-1] == len(output.token_ids) - 1 >= asked.min_tokens
            else:
                assert output.finish_reason == "length"
                assert len(output.token_ids) == asked.max_tokens
            assert all(index < asked.min_tokens for index in stopped[:-1])


def check_logprobs(prompt: list[int], output: CompletionOutput, law: Law) -> None:
    expected = law.logits(prompt, output.token_ids).log_softmax(-1)
    assert output.logprobs is not None and len(output.logprobs) == len(output.token_ids)
    for token, candidates, row in zip(output.token_ids, output.logprobs, expected):
        assert next(iter(candidates)) == token
        for each, entry in candidates.items():
            assert abs(entry.logprob - float(row[each])) < 2 * law.error
        values = [entry.logprob for each, entry in candidates.items() if each != token]
        assert values == sorted(values, reverse=True)


def same_answers(mine: Run, others: Run) -> str:
    """Of how many answers all ids are the other run's."""
    shown = []
    for name in ("greedy", "warm", "reported", "mixture", "edited", "forked"):
        pairs = [
            (one.token_ids, other.token_ids)
            for a, b in zip(getattr(mine, name), getattr(others, name))
            for one, other in zip(a.outputs, b.outputs)
        ]
        shown.append(f"{name} {sum(one == other for one, other in pairs)}/{len(pairs)}")
    return ", ".join(shown)


class References:
    """What a CPU answers in FP32, by model; and the law, by model and dtype."""

    def __init__(self) -> None:
        self._runs: dict[str, Run] = {}
        self._laws: dict[tuple[str, str], Law] = {}

    def law(self, model: str, dtype: str) -> Law:
        if (model, dtype) not in self._laws:
            exact = self._laws.setdefault(
                (model, "float32"), Law(oracle(models.path(model)), ERROR["float32"])
            )
            self._laws[model, dtype] = exact.with_error(ERROR[dtype])
        return self._laws[model, dtype]

    def run(self, model: str) -> Run:
        if model not in self._runs:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(device, "visible_gpus", list)
                self._runs[model] = run(models.path(model), "float32")
            verdict = judge(self._runs[model], self.law(model, "float32"))
            assert verdict.near_ties <= NEAR_TIES["float32"] * verdict.tokens
        return self._runs[model]


@pytest.fixture(scope="module")
def references() -> References:
    return References()


@pytest.mark.parametrize("model,dtype,way", RUNS)
def test_answers_are_the_oracles_up_to_near_ties(
    model: str, dtype: str, way: str, references: References
) -> None:
    settings, law = WAYS[way], references.law(model, dtype)
    expected = references.run(model)
    found = run(models.path(model), dtype, **settings)
    verdict = judge(found, law)
    for prompt, answer in zip(PROMPTS[-len(found.reported) :], found.reported):
        check_logprobs(prompt, answer.outputs[0], law)
    for params, answers in (
        ([GREEDY] * 40, found.greedy),
        (MIXTURE_PARAMS, found.mixture),
        (EDITED_PARAMS, found.edited),
        ([FORKED] * 4, found.forked),
    ):
        check_ends(answers, params)
    print(
        f"\n{model} {dtype} {way}: {verdict.near_ties} near-ties of {verdict.tokens} tokens taken "
        f"otherwise, largest {verdict.gap:.3f}; as FP32: {same_answers(found, expected)}"
    )
    assert verdict.near_ties <= NEAR_TIES[dtype] * verdict.tokens
    stats = found.stats
    caching = settings.get("enable_prefix_caching", True)
    assert (stats.prefix_hits > 0) == (stats.num_copies > 0) == caching
    assert (stats.num_preemptions > 0) == ("num_gpu_blocks_override" in settings)
    choices = found.forked[0].outputs
    assert len(choices) == min(4, settings.get("max_num_seqs", 4))
    assert len({tuple(choice.token_ids) for choice in choices}) == len(choices)


@pytest.mark.parametrize("model", ["L64", "Q128"])
def test_prompt_logprobs_are_the_oracles(model: str) -> None:
    prompts = [PROMPTS[13], PROMPTS[-1], PROMPTS[2]]
    params = SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=3)
    for settings in ({}, {"long_prefill_token_threshold": 7}, {"max_num_batched_tokens": 64}):
        with engine(models.path(model), "bfloat16", **settings) as llm:
            llm.generate(prompts, GREEDY, use_tqdm=False)  # a warm cache is not read
            answers = llm.generate(prompts, params, use_tqdm=False)
        for prompt, answer in zip(prompts, answers):
            expected = oracle(models.path(model)).logits(prompt).log_softmax(-1)
            found = answer.prompt_logprobs
            assert found is not None and found[0] is None and len(found) == len(prompt)
            for position, candidates in enumerate(found[1:], start=1):
                assert prompt[position] in candidates and len(candidates) in (3, 4)
                for token, entry in candidates.items():
                    value = float(expected[position - 1, token])
                    assert abs(entry.logprob - value) < 2 * ERROR["bfloat16"]


@pytest.mark.parametrize("name", ["R-F16", "R-F32"])
def test_gguf_answers_are_the_oracles(name: str) -> None:
    """Rounded to BF16 on the way, in the other rotary order."""
    law, verdict = Law(oracle(models.path("R")), ERROR["bfloat16"]), Verdict()
    with engine(models.path(name), "bfloat16") as llm:
        for prompt, answer in zip(PROMPTS, llm.generate(PROMPTS, GREEDY, use_tqdm=False)):
            verdict += law.judge(prompt, answer.outputs[0].token_ids, GREEDY)
    assert verdict.tokens > 0 and verdict.near_ties <= NEAR_TIES["bfloat16"] * verdict.tokens


def test_a_closed_engine_has_given_its_memory_back() -> None:
    for _ in range(2):
        with engine(models.path("L64"), "bfloat16", kv_cache_memory_bytes=1 << 30) as llm:
            llm.generate(PROMPTS[:4], GREEDY, use_tqdm=False)
            assert torch.cuda.memory_allocated() > 1 << 30
        assert torch.cuda.memory_allocated() < 128 << 20  # cuBLAS keeps 32 MiB per stream
