"""Beam search over HTTP: what ``LLM.beam_search`` finds, in the shape of any other answer."""

from __future__ import annotations

import time

import httpx
import numpy as np
import pytest

from octavo.types import BeamSearchParams
from tests.fixtures.oracle import oracle
from tests.fixtures.waiting import until
from tests.test_beam_search import slow_search

BEAMS = {"use_beam_search": True, "max_tokens": 6}


def post(server, path="/v1/completions", **body):
    answer = server.client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_completions_are_the_best_beams(server_r, model_r):
    rng = np.random.default_rng(8)
    prompts = [rng.integers(5, 300, size=length).tolist() for length in (18, 3)]
    body = {"prompt": prompts, "n": 3, "logprobs": 1, "return_token_ids": True, **BEAMS}
    for penalty in (1.0, 0.0):
        answer = post(server_r, **body, length_penalty=penalty)
        choices = answer["choices"]
        assert [choice["index"] for choice in choices] == list(range(6))
        params = BeamSearchParams(3, max_tokens=6, length_penalty=penalty)
        count = 0
        for prompt, own in zip(prompts, (choices[:3], choices[3:])):
            expected = slow_search(oracle(model_r), prompt, params, {1})
            assert [c["token_ids"] for c in own] == [tokens for tokens, *_ in expected]
            assert [c["finish_reason"] for c in own] == [how for *_, how in expected]
            for choice, (tokens, total, _) in zip(own, expected):
                values = choice["logprobs"]["token_logprobs"]
                assert sum(values) == pytest.approx(total, abs=1e-3)
                assert choice["prompt_token_ids"] == prompt and len(values) == len(tokens)
                assert all(1 <= len(top) <= 2 for top in choice["logprobs"]["top_logprobs"])
            count += sum(len(tokens) for tokens, *_ in expected)
        assert answer["usage"]["completion_tokens"] == count
        assert answer["usage"]["prompt_tokens"] == 21
        timings = answer["timings"]
        assert 0 <= timings["queue_seconds"] <= timings["first_token_seconds"]
        assert timings["first_token_seconds"] < timings["total_seconds"]
    server_r.wait_idle()


def test_chat_takes_beams_and_one_beam_is_greedy(server_r):
    messages = [{"role": "user", "content": "hi"}]
    greedy = post(server_r, "/v1/chat/completions", messages=messages, temperature=0,
                  max_tokens=6, ignore_eos=True, logprobs=True)  # fmt: skip
    beam = post(server_r, "/v1/chat/completions", messages=messages, ignore_eos=True,
                logprobs=True, **BEAMS)  # fmt: skip
    assert beam["choices"][0]["message"] == greedy["choices"][0]["message"]
    tokens = [[e["token"] for e in a["choices"][0]["logprobs"]["content"]] for a in (beam, greedy)]
    assert tokens[0] == tokens[1]
    assert {**beam["usage"], "prompt_tokens_details": 0} == {
        **greedy["usage"], "prompt_tokens_details": 0,
    }  # fmt: skip
    several = post(server_r, "/v1/chat/completions", messages=messages, n=4, **BEAMS)
    assert len({c["message"]["content"] for c in several["choices"]}) == 4


def test_stop_strings_and_counts(server_r):
    body = {"prompt": "hello there", "return_token_ids": True, "ignore_eos": True, **BEAMS}
    (plain,) = post(server_r, **body)["choices"]
    stop = plain["text"][2:5]
    before = server_r.metrics()
    answer = post(server_r, **body, n=2, stop=stop)
    after = server_r.metrics()
    ended = [choice for choice in answer["choices"] if choice["stop_reason"] == stop]
    assert ended and all(stop not in choice["text"] for choice in answer["choices"])
    assert all(len(c["token_ids"]) <= 6 for c in ended)
    for name, count in (
        ("vllm:generation_tokens_total", answer["usage"]["completion_tokens"]),
        ("vllm:prompt_tokens_total", answer["usage"]["prompt_tokens"]),
        ("vllm:request_params_n_count", 1),
        ("vllm:request_generation_tokens_count", 2),
    ):
        assert after[name] - before[name] == count, name


def test_prompts_beyond_what_runs_at_once_follow(server_r):
    """128 sequences run at once, so two prompts of 64 beams do."""
    prompts = [[20 + i, 30, 40] for i in range(5)]
    body = {"n": 64, "use_beam_search": True, "max_tokens": 2, "return_token_ids": True}
    together = post(server_r, prompt=prompts, **body)["choices"]
    assert [c["index"] for c in together] == [*range(5 * 64)]
    alone = [c for prompt in prompts for c in post(server_r, prompt=prompt, **body)["choices"]]
    for one, other in zip(together, alone, strict=True):
        assert one["token_ids"] == other["token_ids"]
        assert one["prompt_token_ids"] == other["prompt_token_ids"]
    too_many = server_r.client.post("/v1/completions", json={"prompt": "a", **body, "n": 65})
    assert too_many.status_code == 400 and "at most 64" in too_many.text


def test_a_client_that_leaves_ends_its_search(server_r):
    body = {"prompt": "x", "n": 8, "use_beam_search": True, "max_tokens": 1500, "ignore_eos": True}
    before = server_r.metrics()["octavo_requests_admitted_total"]
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{server_r.url}/v1/completions", json=body, timeout=0.5)
    until(lambda: not server_r.client.get("/load").json()["server_load"])
    begun = server_r.wait_idle()["octavo_requests_admitted_total"]
    assert begun - before < 8 * 1500 / 2
    time.sleep(0.2)
    assert server_r.metrics()["octavo_requests_admitted_total"] == begun


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"stream": True}, "stream"),
        ({"temperature": 0.7}, "temperature"),
        ({"top_p": 0.5}, "top_p"),
        ({"top_k": 5}, "top_k"),
        ({"min_p": 0.1}, "min_p"),
        ({"presence_penalty": 1}, "presence_penalty"),
        ({"frequency_penalty": 1}, "frequency_penalty"),
        ({"repetition_penalty": 2}, "repetition_penalty"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"allowed_token_ids": [5]}, "allowed_token_ids"),
        ({"bad_words": ["x"]}, "bad_words"),
        ({"prompt_logprobs": 1}, "prompt_logprobs"),
        ({"echo": True, "logprobs": 1}, "echo"),
        ({"length_penalty": 1e9}, "length_penalty"),
        ({"n": 9}, "n"),
        ({"use_beam_search": False, "length_penalty": 2}, "length_penalty"),
        ({"use_beam_search": False, "early_stopping": True}, "early_stopping"),
    ],
)
def test_what_has_no_say_in_a_search_is_refused(server, body, param):
    answer = server.post("/v1/completions", prompt="a", **{**BEAMS, **body})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text
    neutral = {"temperature": 0, "top_p": 1, "top_k": -1, "min_p": 0, "repetition_penalty": 1}
    assert server.post("/v1/completions", prompt="a", **BEAMS, **neutral).status_code == 200


def test_a_timeout_says_how_far_the_search_had_come(server_r):
    body = {"prompt": "x", "n": 8, "use_beam_search": True, "max_tokens": 1500, "ignore_eos": True}
    answer = server_r.client.post("/v1/completions", json={**body, "timeout": 0.3})
    assert answer.status_code == 408 and answer.json()["error"]["code"] == "timeout"
    assert "steps of the search were done" in answer.json()["error"]["message"]
    server_r.wait_idle()
