"""The routes on a real engine (model R): what the mock cannot show."""

from __future__ import annotations

import contextlib
import json

import httpx

from tests.fixtures import server
from tests.fixtures.waiting import PATIENCE


def post(server, path="/v1/completions", **body):
    answer = server.client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_streamed_text_and_logprobs_equal_the_whole_answer(server_r):
    body = {"prompt": "hello there", "max_tokens": 12, "temperature": 0, "logprobs": 3}
    whole = post(server_r, **body)["choices"][0]
    raw = server_r.client.post("/v1/completions", json={**body, "stream": True}).text
    events = [json.loads(line[6:]) for line in raw.split("\n\n") if line.startswith("data: {")]
    choices = [event["choices"][0] for event in events]
    assert "".join(choice["text"] for choice in choices) == whole["text"]
    tokens = [token for choice in choices for token in choice["logprobs"]["tokens"]]
    assert tokens == whole["logprobs"]["tokens"]
    assert len(tokens) == 12


def test_seeded_choices_repeat_and_differ(server_r):
    body = {"prompt": "hello", "n": 3, "seed": 7, "temperature": 1.5, "max_tokens": 12}
    first, second = (post(server_r, **body)["choices"] for _ in range(2))
    assert first == second
    assert len({choice["text"] for choice in first}) == 3


def test_echoed_prompt_logprobs_are_those_of_generation(server_r):
    """What the model says of a token is the same whether it drew it or was given it."""
    body = {"temperature": 0, "logprobs": 1, "return_token_ids": True}
    drawn = post(server_r, prompt="hello there", max_tokens=6, **body)["choices"][0]
    ids = [*drawn["prompt_token_ids"], *drawn["token_ids"]]
    echoed = post(server_r, prompt=ids, echo=True, max_tokens=0, **body)["choices"][0]
    values = echoed["logprobs"]["token_logprobs"]
    assert values[0] is None and len(values) == len(ids)
    for given, own in zip(values[-6:], drawn["logprobs"]["token_logprobs"]):
        assert abs(given - own) < 1e-3


def test_cached_tokens_are_reported(server_r):
    ids = list(range(5, 205))
    post(server_r, prompt=ids, max_tokens=1, cache_salt="here")
    again = post(server_r, prompt=ids, max_tokens=1, cache_salt="here")
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 199
    other = post(server_r, prompt=ids, max_tokens=1, cache_salt="elsewhere")
    assert other["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


def test_a_client_that_leaves_frees_its_blocks(server_r):
    body = {"prompt": "x", "max_tokens": 400, "ignore_eos": True, "stream": True}
    for _ in range(5):
        with (
            contextlib.suppress(httpx.HTTPError),
            httpx.stream("POST", f"{server_r.url}/v1/completions", json=body) as answer,
        ):
            next(answer.iter_lines())
    server_r.wait_idle()


def test_chat_through_the_template(server_r):
    messages = [{"role": "user", "content": "hi"}]
    answer = post(server_r, "/v1/chat/completions", messages=messages, max_tokens=3)
    ids = post(server_r, "/tokenize", messages=messages)["tokens"]
    assert answer["usage"]["prompt_tokens"] == len(ids)
    assert answer["usage"]["completion_tokens"] == 3


def test_two_api_processes_share_one_engine_and_its_cache(model_r):
    flags = ["--dtype", "float32", "--kv-cache-memory-bytes", "16MiB", "--api-server-count", "2"]
    with server.start(model_r, *flags) as running:
        prompt = list(range(3, 60))
        seen, texts, cached = set(), set(), []
        for _ in range(60):
            with httpx.Client(base_url=running.url, timeout=PATIENCE) as client:
                index = client.get("/server_info").json()["api_process"]["index"]
                body = {"prompt": prompt, "max_tokens": 6, "temperature": 0}
                answer = client.post("/v1/completions", json=body).json()
            texts.add(answer["choices"][0]["text"])
            if index not in seen:
                cached.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
            seen.add(index)
            if len(seen) == 2:
                break
        assert seen == {0, 1} and len(texts) == 1
        assert cached[0] == 0 and cached[1] > 40, "what one has computed serves the other"
