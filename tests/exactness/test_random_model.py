"""R answers as the oracle says, and draws the same seeded tokens, in whatever way it is run.

The oracle recomputes everything for each token; the engine chunks, batches, shares, copies,
preempts and overlaps. Token ids are equal and, in FP32, log-probabilities are within 1e-4.
"""

from __future__ import annotations

import random
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from octavo import LLM, SamplingParams
from octavo.engine.verify_cost import VerifyCosts
from octavo.outputs import CompletionOutput, RequestOutput
from tests.fixtures import models
from tests.fixtures.oracle import Oracle, oracle

TOLERANCE = 1e-4
EOS, IM_END = 1, 3
ITSELF = "the model itself"

# Way of running -> settings. Every test below runs under each of them.
WAYS: dict[str, dict[str, Any]] = {
    "default": {},
    "chunks of 1": {"long_prefill_token_threshold": 1},
    "chunks of 7": {"long_prefill_token_threshold": 7},
    "chunks of 64": {"long_prefill_token_threshold": 64},
    "whole prompts": {"enable_chunked_prefill": False},
    "17 tokens a step": {"max_num_batched_tokens": 17},
    "blocks of 1": {"block_size": 1},
    "blocks of 4": {"block_size": 4},
    "blocks of 32": {"block_size": 32},
    "5 at once": {"max_num_seqs": 5},
    "one at a time": {"max_num_seqs": 1},
    "no prefix cache": {"enable_prefix_caching": False},
    "no overlap": {"async_scheduling": False},
    "10 blocks": {"num_gpu_blocks_override": 10},
    "10 blocks, no overlap": {"num_gpu_blocks_override": 10, "async_scheduling": False},
    "10 blocks, chunks of 7": {
        "num_gpu_blocks_override": 10,
        "long_prefill_token_threshold": 7,
    },
    "10 blocks, no prefix cache": {
        "num_gpu_blocks_override": 10,
        "enable_prefix_caching": False,
    },
    "40 blocks of 4": {"num_gpu_blocks_override": 40, "block_size": 4},
    "ngram": {"spec_method": "ngram"},
    "suffix, 5 at once": {"spec_method": "suffix", "max_num_seqs": 5},
    "first layer": {"speculative_config": {"draft_layers": 1}},
    "its own draft, 10 blocks": {
        "speculative_config": {"model": ITSELF},
        "num_gpu_blocks_override": 10,
    },
    "ngram or draft, no overlap": {
        "speculative_config": {"method": "ngram+draft_model", "model": ITSELF},
        "async_scheduling": False,
    },
}


def make_prompts() -> list[list[int]]:
    """Lengths around block boundaries; half share a beginning that ends in mid-block."""
    rng = random.Random(20261129)
    stem = [0, *(rng.randrange(4, 320) for _ in range(40))]
    lengths = (1, 2, 15, 16, 17, 31, 33, 64, 90)
    alone = [[0, *(rng.randrange(4, 320) for _ in range(n - 1))] for n in lengths]
    shared = [stem + [rng.randrange(4, 320) for _ in range(n)] for n in (1, 5, 23, 24, 40)]
    return alone + shared


PROMPTS = make_prompts()
GREEDY = SamplingParams(temperature=0, max_tokens=24, logprobs=5)
SEEDED = SamplingParams(temperature=0.9, top_p=0.95, max_tokens=24, seed=11, logprobs=0)


@contextmanager
def engine(model: Path, **settings: Any):
    flags = {"dtype": "float32", "max_model_len": 160, "cpu_threads": 1}
    flags["kv_cache_memory_bytes"] = 8 << 20
    if "num_gpu_blocks_override" in settings:
        del flags["kv_cache_memory_bytes"]
    with closing(LLM(str(model), **{**flags, **settings})) as llm:
        yield llm


@dataclass
class Run:
    """What one way of running gave: three rounds of all prompts, and the engine's counts."""

    cold: list[RequestOutput]
    warm: list[RequestOutput]
    seeded: list[RequestOutput]
    forked: list[RequestOutput]  # n = 4, or 1 where one runs at a time
    preemptions: int
    copies: int
    hits: int
    guesses: int
    settings: dict[str, Any] = field(default_factory=dict)


@pytest.fixture(scope="module", params=WAYS, ids=lambda way: way.replace(" ", "-"))
def run(request, model_r) -> Run:
    settings = dict(WAYS[request.param])
    if settings.get("speculative_config", {}).get("model") == ITSELF:
        settings["speculative_config"] = {**settings["speculative_config"], "model": str(model_r)}
    with pytest.MonkeyPatch.context() as patch, engine(model_r, **settings) as llm:
        # Guesses are free: as many as may be are made.
        patch.setattr(VerifyCosts, "seconds", lambda self, rows, guesses: np.ones(len(guesses)))
        cold = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
        warm = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
        seeded = llm.generate(PROMPTS, SEEDED, use_tqdm=False)
        params = SEEDED.clone(n=min(4, llm.info.max_num_seqs), max_tokens=12)
        forked = llm.generate(PROMPTS[6:7], params, use_tqdm=False)
        llm.engine.scheduler.check()
        stats = llm.stats
    assert stats.blocks_used == stats.num_running == stats.num_waiting == 0
    return Run(
        cold,
        warm,
        seeded,
        forked,
        stats.num_preemptions,
        stats.num_copies,
        stats.prefix_hits,
        stats.num_draft_tokens,
        settings,
    )


@pytest.fixture(scope="module")
def alone(model_r) -> dict[int, list[CompletionOutput]]:
    """Seeded answers by choice of n, each drawn by a request that ran alone and uncached."""
    answers: dict[int, list[CompletionOutput]] = {}
    with engine(model_r, enable_prefix_caching=False, async_scheduling=False) as llm:
        answers[0] = [
            llm.generate(prompt, SEEDED, use_tqdm=False)[0].outputs[0] for prompt in PROMPTS
        ]
        params = [SEEDED.clone(seed=11 + choice, max_tokens=12) for choice in range(4)]
        answers[4] = [
            llm.generate(PROMPTS[6], each, use_tqdm=False)[0].outputs[0] for each in params
        ]
    return answers


def assert_greedy(
    reference: Oracle, prompt: list[int], output: CompletionOutput, ends: tuple[int, ...] = (EOS,)
) -> None:
    """Token ids equal the oracle's, and every log-probability given is the oracle's. ``ends``: ids
    that end an output."""
    assert output.token_ids == reference.greedy(prompt, GREEDY.max_tokens, ends)
    assert output.finish_reason == ("stop" if output.token_ids[-1] in ends else "length")
    assert output.logprobs is not None and len(output.logprobs) == len(output.token_ids)
    for index, candidates in enumerate(output.logprobs):
        expected = reference.logprobs(prompt + output.token_ids[:index])
        assert next(iter(candidates)) == output.token_ids[index]
        assert len(candidates) == 5
        for token, entry in candidates.items():
            assert abs(entry.logprob - float(expected[token])) < TOLERANCE
        assert set(candidates) == set(expected.topk(5).indices.tolist())


def test_greedy_output_equals_the_oracle(run: Run, model_r):
    for prompt, answer in zip(PROMPTS, run.cold):
        assert_greedy(oracle(model_r), prompt, answer.outputs[0])


def test_a_warm_cache_changes_nothing(run: Run, model_r):
    for prompt, answer in zip(PROMPTS, run.warm):
        assert_greedy(oracle(model_r), prompt, answer.outputs[0])
    if run.settings.get("enable_prefix_caching", True):
        assert run.hits > 0
    else:
        assert run.hits == 0 and all(answer.num_cached_tokens == 0 for answer in run.warm)


def test_seeded_draws_depend_on_seed_and_position_only(run: Run, alone):
    for mine, expected in zip(run.seeded, alone[0]):
        assert mine.outputs[0].token_ids == expected.token_ids
        assert abs(mine.outputs[0].cumulative_logprob - expected.cumulative_logprob) < 24e-4


def test_choices_of_one_request_equal_single_requests(run: Run, alone):
    choices = run.forked[0].outputs
    assert len(choices) == min(4, run.settings.get("max_num_seqs", 4))
    for index, (choice, expected) in enumerate(zip(choices, alone[4])):
        assert choice.index == index and choice.token_ids == expected.token_ids
    assert len({tuple(choice.token_ids) for choice in choices}) == len(choices)


def test_the_ways_do_what_their_names_say(run: Run):
    if "num_gpu_blocks_override" in run.settings:
        assert run.preemptions > 0
    elif run.settings.get("enable_prefix_caching", True):
        assert run.preemptions == 0
    caching = run.settings.get("enable_prefix_caching", True)
    if caching and run.settings.get("block_size") != 1:
        assert run.copies > 0  # partial blocks were shared and written
    if not caching:
        assert run.copies == 0
    guesses = {"spec_method", "speculative_config"} & run.settings.keys()
    assert (run.guesses > 0) == bool(guesses)


def test_prompt_logprobs_equal_the_oracle_in_chunks(model_r):
    prompt = PROMPTS[-1]
    expected = torch.log_softmax(oracle(model_r).logits(prompt), dim=-1)
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=3)
    for settings in ({}, {"long_prefill_token_threshold": 7}):
        with engine(model_r, **settings) as llm:
            llm.generate(prompt, GREEDY, use_tqdm=False)  # a warm cache is not read
            found = llm.generate(prompt, params, use_tqdm=False)[0].prompt_logprobs
        assert found is not None and found[0] is None and len(found) == len(prompt)
        for position, candidates in enumerate(found[1:], start=1):
            assert prompt[position] in candidates
            for token, entry in candidates.items():
                assert abs(entry.logprob - float(expected[position - 1, token])) < TOLERANCE


def test_stop_strings_survive_preemption(model_r):
    """Text is cut at the same place whether or not the request lost its blocks meanwhile."""
    with engine(model_r) as llm:
        whole = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
        texts = [answer.outputs[0].text for answer in whole]
        stops = [text[len(text) // 2 :][:2] or None for text in texts]
        params = [GREEDY.clone(stop=[stop] if stop else []) for stop in stops]
        expected = [a.outputs[0] for a in llm.generate(PROMPTS, params, use_tqdm=False)]
    with engine(model_r, num_gpu_blocks_override=10) as llm:
        found = [a.outputs[0] for a in llm.generate(PROMPTS, params, use_tqdm=False)]
        assert llm.stats.num_preemptions > 0
    assert [each.text for each in found] == [each.text for each in expected]
    assert [each.finish_reason for each in found] == [each.finish_reason for each in expected]
    assert [each.token_ids for each in found] == [each.token_ids for each in expected]
    assert any(each.finish_reason == "stop" and each.stop_reason for each in found)


@pytest.mark.parametrize("name", ["R-F32", "R-vpad", "R-nobos"])
def test_variants_of_r_equal_their_oracle(name, model_r):
    reference = oracle(model_r if name == "R-F32" else models.path(name))
    # A GGUF file that names no end of a turn takes the one of its chat template.
    ends = (EOS, IM_END) if name == "R-F32" else (EOS,)
    with engine(models.path(name)) as llm:
        for prompt, answer in zip(PROMPTS, llm.generate(PROMPTS, GREEDY, use_tqdm=False)):
            assert_greedy(reference, prompt, answer.outputs[0], ends)


def test_f16_gguf_is_close_to_its_safetensors_twin(model_r):
    """Same rows in the other rotary order, and grouped queries: logits would be nonsense, not
    slightly off, if either were wrong."""
    prompt = PROMPTS[-1]
    expected = torch.log_softmax(oracle(model_r).logits(prompt), dim=-1)
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    with engine(models.path("R-F16")) as llm:
        found = llm.generate(prompt, params, use_tqdm=False)[0].prompt_logprobs
    for position, candidates in enumerate(found[1:], start=1):
        entry = candidates[prompt[position]]
        assert abs(entry.logprob - float(expected[position - 1, prompt[position]])) < 5e-2


def test_every_eos_of_the_generation_config_ends_the_answer(model_r):
    reference = oracle(models.path("R-eos2"))
    with engine(models.path("R-eos2")) as llm:
        for eos in (1, 3):
            for num_tokens in (0, 1, 4):
                params = SamplingParams(
                    temperature=0, max_tokens=32, min_tokens=num_tokens, logit_bias={eos: 100.0}
                )
                answer = llm.generate(PROMPTS[3], params, use_tqdm=False)[0].outputs[0]
                assert len(answer.token_ids) == num_tokens + 1
                assert answer.token_ids[-1] == eos and not {1, 3} & set(answer.token_ids[:-1])
                assert answer.finish_reason == "stop"
        ignoring = SamplingParams(
            temperature=0, max_tokens=40, ignore_eos=True, logit_bias={3: 100.0}
        )
        answer = llm.generate(PROMPTS[3], ignoring, use_tqdm=False)[0].outputs[0]
        assert answer.token_ids == [3] * 40 and answer.finish_reason == "length"
        greedy = llm.generate(PROMPTS[3], GREEDY, use_tqdm=False)[0].outputs[0]
        assert greedy.token_ids == reference.greedy(PROMPTS[3], 24, (1, 3))
