"""POST /v1/embeddings: shapes, encodings and refusals on the mock engine, values on a real one."""

from __future__ import annotations

import base64
import contextlib
import socket

import numpy as np
import openai
import pytest
import torch

from tests.fixtures.oracle import oracle
from tests.fixtures.waiting import until
from tests.server import mock_server
from tests.server.test_lifecycle import ENDLESS, SLOW

PATH = "/v1/embeddings"


def vectors(server, given, **body):
    answer = server.post(PATH, input=given, **body)
    assert answer.status_code == 200, answer.text
    return [entry["embedding"] for entry in answer.json()["data"]]


@pytest.mark.parametrize(
    ("given", "prompts"),
    [
        ("ab", [[256, 97, 98]]),
        (["ab", "c"], [[256, 97, 98], [256, 99]]),
        ([97, 98], [[97, 98]]),
        ([[97, 98], [5]], [[97, 98], [5]]),
    ],
)
def test_every_kind_of_input(server, given, prompts):
    expected = [[len(ids), ids[0], ids[-1], 1] for ids in prompts]
    assert vectors(server, given, normalize=False) == expected
    answer = server.post(PATH, input=given).json()
    assert answer["object"] == "list" and answer["model"] == "mock"
    assert answer["id"].startswith("embd-")
    assert [(e["object"], e["index"]) for e in answer["data"]] == [
        ("embedding", i) for i in range(len(prompts))
    ]
    count = sum(map(len, prompts))
    assert answer["usage"] == {
        "prompt_tokens": count, "total_tokens": count,
        "prompt_tokens_details": {"cached_tokens": 4 * len(prompts)},
    }  # fmt: skip
    assert 0 <= answer["timings"]["queue_seconds"] <= answer["timings"]["total_seconds"]
    for entry in answer["data"]:
        assert np.linalg.norm(entry["embedding"]) == pytest.approx(1.0)


def test_base64_holds_the_same_as_float32(server):
    (encoded,) = vectors(server, "abc", encoding_format="base64")
    (floats,) = vectors(server, "abc", encoding_format="float")
    decoded = np.frombuffer(base64.b64decode(encoded), dtype="<f4")
    np.testing.assert_array_equal(decoded, np.array(floats, dtype=np.float32))


def test_options_change_the_vector(server):
    assert vectors(server, "abc", normalize=False, add_special_tokens=False) == [[3, 97, 99, 1]]
    assert vectors(server, "abc", use_activation=False, truncate_prompt_tokens=2) == [
        [2, 98, 99, 1]
    ]
    assert vectors(server, "ab", dimensions=4) == vectors(server, "ab", user="someone")
    long = [5] * 600  # the model's length is 512
    assert vectors(server, long, normalize=False, truncate_prompt_tokens=-1)[0][0] == 512
    messages = [{"role": "user", "content": "hi"}]
    answers = [
        server.post(PATH, messages=messages, add_generation_prompt=flag, normalize=False).json()
        for flag in (None, True)
    ]
    plain, prompted = (answer["data"][0]["embedding"][0] for answer in answers)
    for flag, found in ((False, plain), (True, prompted)):
        wanted = server.post("/tokenize", messages=messages, add_generation_prompt=flag).json()
        assert found == wanted["count"]
    assert plain < prompted


def test_more_inputs_than_the_engine_runs_or_queues():
    """2,048 inputs are one request of OpenAI's API; here 8 run at once and 3 may wait."""
    with mock_server.start(scheduler={"max_num_queued_reqs": 3}) as server:
        found = vectors(server, [[i % 250, 7] for i in range(2048)], normalize=False)
        assert [v[1] for v in found] == [i % 250 for i in range(2048)]
        assert server.metric("vllm:request_success_total") == 2048
        assert server.metric("vllm:prompt_tokens_total") == 4096
        assert server.metric("vllm:request_prompt_tokens_count") == 2048
        server.wait_idle()


@pytest.mark.parametrize(
    ("body", "param", "said"),
    [
        ({}, "input", "exactly one of input and messages"),
        ({"input": "a", "messages": [{"role": "user", "content": "a"}]}, "input", "exactly one"),
        ({"input": []}, "input", "empty list"),
        ({"input": [[]]}, "input", "the prompt is empty"),
        ({"input": [260]}, "input", "outside the vocabulary"),
        ({"input": [5] * 513}, "input", "513 tokens, this model's maximum context length is 512"),
        ({"input": ["a"] * 2049}, "input", "2049 inputs; at most 2048"),
        ({"input": 7}, "input", "a list of token id lists"),
        ({"input": "a", "dimensions": 2}, "dimensions", "have 4 values"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format", "base64"),
        ({"input": "a", "pooling": "cls"}, "pooling", "'last' or 'mean'"),
        ({"input": "a", "normalize": True, "use_activation": False}, "normalize", "contradict"),
        ({"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "it must be -1"),
        ({"input": "a", "priority": 1}, "priority", "--scheduling-policy priority"),
        ({"input": "a", "stream": True}, "stream", "unknown field 'stream'"),
    ],
)
def test_refusals_name_the_field(server, body, param, said):
    answer = server.post(PATH, **body)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == param and said in error["message"]


def test_unknown_model_is_404_and_a_failed_step_500(server):
    assert server.post(PATH, input="a", model="other").status_code == 404
    with mock_server.start(engine={"step_error": True}) as failing:
        answer = failing.post(PATH, input="a")
        assert answer.status_code == 500 and answer.json()["error"]["code"] == "step_failed"
        failing.wait_idle()


def test_a_full_queue_is_429_and_a_missing_key_401():
    settings = {
        "engine": {**SLOW, "max_num_seqs": 1},
        "scheduler": {"max_num_queued_reqs": 0},
        "server": {"api_key": ["k"]},
    }
    with mock_server.start(**settings) as server:
        assert server.post(PATH, input="a").status_code == 401
        server.client.headers["authorization"] = "Bearer k"
        endless = {**ENDLESS, "stream": True}
        with server.client.stream("POST", "/v1/completions", json=endless) as stream:
            next(stream.iter_lines())
            with waiting_request(server):
                answer = server.post(PATH, input="a")
                assert answer.status_code == 429 and int(answer.headers["retry-after"]) >= 1


@contextlib.contextmanager
def waiting_request(server):
    """A connection whose request stands in the queue."""
    body = b'{"prompt": "x"}'
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer k\r\n"
    with opened(server) as client:
        client.sendall(head + b"content-type: application/json\r\n")
        client.sendall(b"content-length: %d\r\n\r\n" % len(body) + body)
        until(lambda: server.load()["num_waiting"])
        yield


def opened(server):
    return socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2])))


def test_a_client_that_leaves_ends_its_request():
    with mock_server.start(engine={"step_seconds": 0.05, "max_num_seqs": 1}) as server:
        body = b'{"input": [%s]}' % b",".join([b"[7]"] * 500)
        head = b"POST /v1/embeddings HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        with opened(server) as client:
            client.sendall(head + b"content-length: %d\r\n\r\n" % len(body) + body)
            until(lambda: server.load()["server_load"])
        server.wait_idle()
        assert server.metric("octavo_requests_admitted_total") < 100


def test_the_openai_client_asks_for_base64(server):
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    answer = client.embeddings.create(model="mock", input=["ab", "c"])
    assert [len(entry.embedding) for entry in answer.data] == [4, 4]
    expected = np.array([3.0, 256, 98, 1])
    np.testing.assert_allclose(
        answer.data[0].embedding, expected / np.linalg.norm(expected), atol=1e-6
    )
    floats = client.embeddings.create(model="mock", input=[97, 98], encoding_format="float")
    assert floats.usage.prompt_tokens == 2
    with pytest.raises(openai.BadRequestError):
        client.embeddings.create(model="mock", input="a", dimensions=3)


def test_vectors_are_the_hidden_states_of_the_last_token(server_r, model_r):
    """R against the slow oracle, alone and beside generation, twice (the second from cache)."""
    prompts = [np.random.default_rng(n).integers(5, 300, size=n).tolist() for n in (1, 17, 90)]
    for _ in range(2):
        answer = server_r.client.post(PATH, json={"input": prompts}).json()
        for prompt, entry in zip(prompts, answer["data"]):
            hidden = oracle(model_r).hidden(prompt)[-1].double()
            expected = torch.nn.functional.normalize(hidden, dim=0).numpy()
            np.testing.assert_allclose(entry["embedding"], expected, rtol=0, atol=1e-4)
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] >= 89 + 16
    many = server_r.client.post(PATH, json={"input": [prompts[1]] * 700}).json()["data"]
    assert [entry["index"] for entry in many] == [*range(700)]
    assert all(len(entry["embedding"]) == len(hidden) for entry in many)
    np.testing.assert_allclose(
        many[-1]["embedding"], answer["data"][1]["embedding"], rtol=0, atol=1e-5
    )
    body = {"input": prompts[2], "pooling": "mean", "normalize": False}
    (entry,) = server_r.client.post(PATH, json=body).json()["data"]
    mean = oracle(model_r).hidden(prompts[2]).mean(0).numpy()
    np.testing.assert_allclose(entry["embedding"], mean, rtol=0, atol=1e-4)


def test_salt_request_id_and_timeout(server_r):
    prompt = np.random.default_rng(77).integers(5, 300, size=80).tolist()

    def cached(**body):
        answer = server_r.client.post(PATH, json={"input": prompt, **body}).json()
        return answer["usage"]["prompt_tokens_details"]["cached_tokens"]

    assert cached() == 0 and cached() >= 79 - 16
    assert cached(cache_salt="apart") == 0
    answer = server_r.client.post(PATH, json={"input": prompt, "request_id": "mine"}).json()
    assert answer["id"] == "embd-mine"
    late = server_r.client.post(PATH, json={"input": [prompt] * 500, "timeout": 0.01})
    assert late.status_code == 408 and "0.01 s" in late.json()["error"]["message"]
    server_r.wait_idle()
