"""Sampling parameters, judged by their effect on answers of real models."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import torch

from octavo import LLM, SamplingParams
from tests.cases.asking import CHAT, COMPLETIONS, post, question
from tests.fixtures import models
from tests.fixtures.oracle import oracle
from tests.fixtures.server import Server

PARIS = "Paris Paris Paris"
EOS_IDS = (1, 3)  # of R-eos2


@pytest.mark.parametrize("temperature", [1e-4, 1e-6, 1e-30])
def test_a_very_small_temperature_is_zero(random_model: Server, temperature: float):
    """T02."""
    ids = [0, 50, 60, 70, 80, 90]
    zero = random_model.complete(ids, max_tokens=100)["choices"]
    small = random_model.complete(ids, max_tokens=100, temperature=temperature)["choices"]
    assert small == zero
    assert len(zero[0]["token_ids"]) > 20 and zero[0]["text"]


def expected(model: Path, prompt: list[int], count: int, **penalty: float) -> list[int]:
    """Greedy answers with penalties, by their definition: presence and frequency count the output,
    repetition the prompt as well."""
    ids: list[int] = []
    for _ in range(count):
        logits = oracle(model).last_logits(prompt + ids).clone()
        if factor := penalty.get("repetition_penalty"):
            for token in {*prompt, *ids}:
                logits[token] = (
                    logits[token] / factor if logits[token] > 0 else logits[token] * factor
                )
        for token in set(ids):
            logits[token] -= penalty.get("frequency_penalty", 0.0) * ids.count(token)
            logits[token] -= penalty.get("presence_penalty", 0.0)
        ids.append(int(logits.argmax()))
    return ids


PENALTIES = [
    {"presence_penalty": 2.0},
    {"frequency_penalty": 2.0},
    {"frequency_penalty": -2.0},
    {"repetition_penalty": 1.5},
    {"presence_penalty": 1.0, "frequency_penalty": 0.5, "repetition_penalty": 1.2},
]


@pytest.mark.parametrize("penalty", PENALTIES, ids=str)
def test_each_penalty_counts_the_tokens_that_it_should(
    random_model: Server, model_r: Path, penalty: dict
):
    """T04, T05: against the definition; log-probabilities are those of the model, as documented."""
    fields = {"max_tokens": 24, "ignore_eos": True, "logprobs": 2}
    plain = random_model.complete(PARIS, **fields)
    prompt = post(random_model, "/tokenize", prompt=PARIS)["tokens"]
    answer = random_model.complete(PARIS, **fields, **penalty)["choices"][0]
    assert answer["token_ids"] == expected(model_r, prompt, 24, **penalty)
    assert answer["token_ids"] != plain["choices"][0]["token_ids"]
    first = plain["choices"][0]["logprobs"]["top_logprobs"][0]
    assert set(answer["logprobs"]["top_logprobs"][0]) >= set(first)


@pytest.fixture(scope="module")
def two_eos() -> Iterator[LLM]:
    with closing(LLM(str(models.path("R-eos2")), dtype="float32", max_model_len=160)) as llm:
        yield llm


@pytest.mark.parametrize("eos", EOS_IDS)
@pytest.mark.parametrize("least", [0, 1, 4])
def test_min_tokens_is_exact_for_every_eos(two_eos: LLM, eos: int, least: int):
    """T09: the prompt, longer than min_tokens, does not count."""
    params = SamplingParams(temperature=0, min_tokens=least, max_tokens=32, logit_bias={eos: 100.0})
    (answer,) = two_eos.generate([0, 40, 50, 60, 70, 80], params, use_tqdm=False)
    ids = answer.outputs[0].token_ids
    assert ids[least:] == [eos] and not set(ids[:least]) & set(EOS_IDS)
    assert answer.outputs[0].finish_reason == "stop"


@pytest.mark.parametrize("eos", EOS_IDS)
def test_ignore_eos_ignores_every_eos_but_no_stop_id(two_eos: LLM, eos: int):
    """T10."""
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, logit_bias={eos: 100.0})
    (answer,) = two_eos.generate([0, 40, 50], params, use_tqdm=False)
    assert answer.outputs[0].token_ids == [eos] * 40
    assert answer.outputs[0].finish_reason == "length"
    (answer,) = two_eos.generate([0, 40, 50], params.clone(stop_token_ids=[eos]), use_tqdm=False)
    assert answer.outputs[0].token_ids == [eos]
    assert (answer.outputs[0].finish_reason, answer.outputs[0].stop_reason) == ("stop", eos)


@pytest.mark.parametrize(
    "fields",
    [{"top_k": 1, "temperature": 1}, {"logit_bias": {"40": -100}}, {"allowed_token_ids": [40]}],
    ids=str,
)
@pytest.mark.parametrize("route", [COMPLETIONS, CHAT])
def test_logprobs_beside_constraints_are_json_and_the_models_own(
    random_model: Server, model_r: Path, route: str, fields: dict
):
    """T20: what a constraint excludes has the log-probability that the model gives it."""
    top: dict = {"logprobs": True, "top_logprobs": 5}
    if route == COMPLETIONS:  # by id: where two tokens have one text, only the likelier is listed
        top = {"logprobs": 5, "return_tokens_as_token_ids": True}
    body = question(route, "hello", max_tokens=4, return_token_ids=True, **top) | fields
    answer = random_model.client.post(route, json=body)
    assert answer.status_code == 200, answer.text
    shown = json.loads(answer.text, parse_constant=pytest.fail)["choices"][0]
    ids = shown.get("prompt_token_ids") or answer.json()["prompt_token_ids"]
    for index, token in enumerate(shown["token_ids"]):
        values = oracle(model_r).logprobs(ids + shown["token_ids"][:index])
        if route == CHAT:
            entry = shown["logprobs"]["content"][index]
            value, best = entry["logprob"], [e["logprob"] for e in entry["top_logprobs"]]
        else:
            value = shown["logprobs"]["token_logprobs"][index]
            best = sorted(shown["logprobs"]["top_logprobs"][index].values(), reverse=True)[:5]
        assert abs(value - float(values[token])) < 1e-3
        assert torch.tensor(best).allclose(values.topk(5).values, atol=1e-3)


def test_constraints_that_leave_no_token_are_the_requests_fault(random_model: Server):
    """T20: allowed ids of which none fits the grammar, told when the first token is to be drawn."""
    body = {"prompt": "hello", "allowed_token_ids": [40], "guided_regex": "[0-9]{3}"}
    answer = random_model.client.post(COMPLETIONS, json=body)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["code"] == "invalid_request" and "allowed_token_ids" in error["message"]
    answer = random_model.client.post(COMPLETIONS, json={**body, "stream": True})
    last = [line for line in answer.text.split("\n\n") if line][-1]
    assert json.loads(last.removeprefix("data: "))["error"] == error
