"""OpenAI's own Python package as the client, on the mock engine."""

from __future__ import annotations

import os
import signal

import openai
import pytest

from tests.server import mock_server

MESSAGES = [{"role": "user", "content": "say:hello"}]


def client_of(server, key="none", **options):
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0, **options)


def test_chat_and_completions(server):
    client = client_of(server)
    assert [m.id for m in client.models.list()] == ["mock", "alias"]
    answer = client.chat.completions.create(
        model="mock", messages=MESSAGES, logprobs=True, top_logprobs=1
    )
    assert answer.choices[0].message.content == "hello"
    assert answer.usage.completion_tokens == len(answer.choices[0].logprobs.content) == 6
    assert answer.usage.prompt_tokens_details.cached_tokens == 4
    again = [*MESSAGES, answer.choices[0].message.model_dump(), *MESSAGES]
    assert client.chat.completions.create(model="mock", messages=again).choices
    text = client.completions.create(model="mock", prompt="say:abc", extra_body={"top_k": 5})
    assert text.choices[0].text == "abc"


def test_streams(server):
    client = client_of(server)
    stream = client.chat.completions.create(
        model="mock", messages=MESSAGES, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    texts = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "".join(texts) == "hello"
    assert chunks[-1].usage.completion_tokens == 6
    stream = client.completions.create(model="mock", prompt="say:abc", stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == "abc"


def test_error_classes(server):
    client = client_of(server)
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="mock", messages=MESSAGES, temperature=9)
    assert (caught.value.param, caught.value.code) == ("temperature", "invalid_request")
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="other", messages=MESSAGES)


def test_leaving_a_stream_and_losing_the_engine():
    with mock_server.start(engine={"step_seconds": 0.02}, server={"api_key": ["k"]}) as server:
        with pytest.raises(openai.AuthenticationError):
            client_of(server).models.list()
        client = client_of(server, "k")
        ask = {"model": "mock", "prompt": "endless", "max_tokens": 400, "stream": True}
        server.client.headers["authorization"] = "Bearer k"
        with client.completions.create(**ask) as stream:
            next(iter(stream))
        server.wait_idle()
        with pytest.raises(openai.APIError, match="engine"):
            for number, _ in enumerate(client.completions.create(**ask)):
                if number == 3:
                    os.kill(server.engine_pid, signal.SIGKILL)
        with pytest.raises(openai.InternalServerError):
            client.completions.create(**ask)
