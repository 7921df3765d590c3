"""``LLM.beam_search`` against searches that share no code with it: one that computes every
continuation's log-probability with the slow oracle, and transformers'."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest
import torch

from octavo import LLM, BeamSearchParams, InvalidRequest, SamplingParams
from octavo.text.output import ChoiceText, stop_string_in
from tests.fixtures.oracle import Oracle, oracle

SETTINGS = {"dtype": "float32", "kv_cache_memory_bytes": 16 << 20, "max_num_seqs": 16}
Found = tuple[list[int], float, str]  # tokens, log-probability, how it ended


@pytest.fixture(scope="module")
def llm(model_r) -> Iterator[LLM]:
    with closing(LLM(str(model_r), **SETTINGS)) as made:
        yield made


def slow_search(
    model: Oracle,
    prompt: list[int],
    params: BeamSearchParams,
    ends: set[int],
    stopped: Callable[[list[int]], bool] = lambda tokens: False,
) -> list[Found]:
    """Every continuation of every live beam, the whole vocabulary, up to the last token."""
    width, live, complete = params.beam_width, [([], 0.0)], []
    early = False
    for length in range(1, params.max_tokens + 1):
        every = []
        for tokens, total in live:
            values = model.logprobs(prompt + tokens).double().tolist()
            every += [([*tokens, token], total + value) for token, value in enumerate(values)]
        every.sort(key=lambda entry: -entry[1])
        live = []
        for place, (tokens, total) in enumerate(every):
            if tokens[-1] in ends and length > params.min_tokens:
                if place < width:
                    complete.append((tokens, total, "stop"))
            else:
                live.append((tokens, total))
            if len(live) == width:
                break
        complete += [(*beam, "stop") for beam in live if stopped(beam[0])]
        live = [beam for beam in live if not stopped(beam[0])]
        early = params.early_stopping and len(complete) >= width
        if early or not live:
            break
    if not early:
        complete += [(*beam, "length") for beam in live]
    complete.sort(key=lambda found: -found[1] / len(found[0]) ** params.length_penalty)
    return complete[:width]


def found_by(llm: LLM, prompts: list[list[int]], params: BeamSearchParams) -> list[list[Found]]:
    outputs = llm.beam_search(prompts, params)
    assert llm.stats.num_running == 0 and llm.stats.blocks_used == 0
    return [
        [(s.tokens[len(prompt) :], s.cum_logprob, str(s.finish_reason)) for s in output.sequences]
        for prompt, output in zip(prompts, outputs)
    ]


def assert_equal(found: list[Found], expected: list[Found]) -> None:
    assert [f[0] for f in found] == [e[0] for e in expected]
    assert [f[2] for f in found] == [e[2] for e in expected]
    np.testing.assert_allclose([f[1] for f in found], [e[1] for e in expected], atol=1e-3)


def prompts_of(*lengths: int) -> list[list[int]]:
    rng = np.random.default_rng(5)
    return [rng.integers(5, 300, size=length).tolist() for length in lengths]


def likely_ends(model: Oracle, prompt: list[int], params: BeamSearchParams) -> list[int]:
    """Tokens that the best beams hold, so that as stop ids they end some of them."""
    beams = slow_search(model, prompt, params, set())
    return [beams[0][0][2], beams[1][0][-2]]


@pytest.mark.parametrize("early_stopping", [False, True])
@pytest.mark.parametrize("length_penalty", [1.0, 0.0, 2.5, -1.0])
@pytest.mark.parametrize("width", [1, 3, 4])
def test_equals_a_search_over_every_continuation(
    llm, model_r, width, length_penalty, early_stopping
):
    model = oracle(model_r)
    (prompt,) = prompts_of(21)
    params = BeamSearchParams(
        width, max_tokens=7, length_penalty=length_penalty, early_stopping=early_stopping
    )
    stops = likely_ends(model, prompt, BeamSearchParams(4, max_tokens=7))
    params = replace(params, stop_token_ids=stops)
    expected = slow_search(model, prompt, params, {*stops, *llm.info.eos_ids})
    (found,) = found_by(llm, [prompt], params)
    assert_equal(found, expected)
    if width > 1 and length_penalty <= 1:
        assert "stop" in {how for *_, how in found}, "no stop id was met: the test shows nothing"


def test_many_prompts_at_once_are_those_prompts_alone(llm, model_r):
    prompts = prompts_of(1, 15, 16, 17, 40, 3, 90)
    params = BeamSearchParams(3, max_tokens=6)
    together = found_by(llm, prompts, params)
    ends = set(llm.info.eos_ids)
    for prompt, found in zip(prompts, together):
        assert_equal(found, slow_search(oracle(model_r), prompt, params, ends))
    limited = llm.beam_search(prompts, params, concurrency_limit=2)
    assert [[s.tokens for s in output.sequences] for output in limited] == [
        [prompt + tokens for tokens, *_ in found] for prompt, found in zip(prompts, together)
    ]


def test_width_one_is_greedy_and_fields_are_filled(llm):
    (prompt,) = prompts_of(20)
    greedy = SamplingParams(temperature=0, max_tokens=12, logprobs=2, ignore_eos=True)
    answer = llm.generate([prompt], greedy, use_tqdm=False)[0].outputs[0]
    (output,) = llm.beam_search([prompt], BeamSearchParams(1, max_tokens=12, ignore_eos=True))
    (sequence,) = output.sequences
    assert sequence.tokens == prompt + answer.token_ids
    assert sequence.text == answer.text and sequence.finish_reason == answer.finish_reason
    assert sequence.cum_logprob == pytest.approx(answer.cumulative_logprob, abs=1e-3)
    for token, own, drawn in zip(answer.token_ids, sequence.logprobs, answer.logprobs):
        assert own[token].rank == 1 and [*own] == [*drawn]
        assert own[token].logprob == pytest.approx(drawn[token].logprob, abs=1e-4)


def test_a_long_search_reads_its_prefixes_from_the_cache(llm):
    (prompt,) = prompts_of(100)
    before = llm.stats
    llm.beam_search([prompt], BeamSearchParams(2, max_tokens=20, ignore_eos=True))
    after = llm.stats
    asked = after.prompt_tokens - before.prompt_tokens
    cached = after.prompt_tokens_cached - before.prompt_tokens_cached
    assert asked - cached < 100 + 39 * (llm.info.block_size + 1)


def test_stop_strings_and_min_tokens(llm, model_r):
    model = oracle(model_r)
    (prompt,) = prompts_of(30)
    plain = BeamSearchParams(3, max_tokens=6)
    tokenizer = llm.get_tokenizer()
    best = slow_search(model, prompt, plain, set(llm.info.eos_ids))[0][0]
    stop = tokenizer.decode(best[1:3])
    assert stop.strip()
    params = replace(plain, stop=[stop])

    def stopped(tokens: list[int]) -> bool:
        return stop in tokenizer.decode(tokens)

    expected = slow_search(model, prompt, params, set(llm.info.eos_ids), stopped)
    (found,) = found_by(llm, [prompt], params)
    assert_equal(found, expected)
    (output,) = llm.beam_search([prompt], params)
    ended = [s for s in output.sequences if s.stop_reason == stop]
    assert ended and all(stop not in s.text for s in ended)
    ends = [best[0]]
    params = replace(plain, min_tokens=3, stop_token_ids=ends)
    expected = slow_search(model, prompt, params, {*ends, *llm.info.eos_ids})
    assert_equal(found_by(llm, [prompt], params)[0], expected)


@pytest.mark.parametrize(("early", "theirs"), [(True, True), (False, "never")])
@pytest.mark.parametrize("penalty", [1.0, 0.3])
def test_equals_transformers(llm, model_r, early, theirs, penalty):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_r, dtype=torch.float32)
    (prompt,) = prompts_of(12)
    params = BeamSearchParams(3, max_tokens=8, early_stopping=early, length_penalty=penalty)
    ends = likely_ends(oracle(model_r), prompt, BeamSearchParams(3, max_tokens=8))
    params = replace(params, stop_token_ids=ends)
    expected = model.generate(
        torch.tensor([prompt]), num_beams=3, num_return_sequences=3, max_new_tokens=8,
        do_sample=False, early_stopping=theirs, length_penalty=penalty, pad_token_id=0,
        eos_token_id=[*ends, *llm.info.eos_ids],
    ).tolist()  # fmt: skip
    (found,) = found_by(llm, [prompt], params)
    for (tokens, *_), sequence in zip(found, expected, strict=True):
        assert tokens == sequence[len(prompt) :][: len(tokens)]


@pytest.mark.parametrize(
    ("params", "field"),
    [
        ({"beam_width": 0}, "beam_width"),
        ({"beam_width": 2, "length_penalty": math.inf}, "length_penalty"),
        ({"beam_width": 2, "temperature": 0.7}, "temperature"),
        ({"beam_width": 17}, "n"),
        ({"beam_width": 2, "max_tokens": 0}, "max_tokens"),
        ({"beam_width": 2, "max_tokens": 5000}, "max_tokens"),
        ({"beam_width": 2, "stop_token_ids": [10**6]}, "stop_token_ids"),
    ],
)
def test_what_cannot_be_searched_is_named(llm, params, field):
    with pytest.raises(InvalidRequest) as caught:
        llm.beam_search([[5, 6]], BeamSearchParams(**params))
    assert caught.value.param == field


def test_stop_strings_are_found_as_a_growing_answer_finds_them(llm):
    """In texts of odd tokens (control tokens, parts of characters), at every length."""
    tokenizer = llm.get_tokenizer()
    rng = np.random.default_rng(4)
    for trial in range(200):
        tokens = rng.integers(0, llm.info.vocab_size, size=14).tolist()
        text = tokenizer.decode(tokens)
        begin = int(rng.integers(0, max(1, len(text) - 3)))
        params = SamplingParams(
            stop=[text[begin : begin + 3] or "x", "\ufffd", text[-2:] or "y"],
            min_tokens=int(rng.integers(0, 6)), max_tokens=20,
            skip_special_tokens=bool(trial % 2),
        )  # fmt: skip
        growing = ChoiceText(tokenizer, params, eos_ids=())
        for count in range(1, len(tokens) + 1):
            growing.push(tokens[count - 1 : count])
            assert stop_string_in(tokenizer, params, tokens[:count]) == growing.stop_string
            if growing.stop_string is not None:
                break
