"""OpenAI's own package: synchronous and not, whole and streamed, and vectors."""

from __future__ import annotations

import asyncio
import base64
from typing import Any

import numpy as np
import pytest

from tests.fixtures.server import Server

openai = pytest.importorskip("openai", reason="openai is not installed: make conformance")
pytestmark = pytest.mark.conformance

ASK: dict[str, Any] = {
    "model": "demo",
    "messages": [{"role": "user", "content": "Hello"}],
    "temperature": 0,
    "max_tokens": 32,
}


def client_of(server: Server, kind: Any = None) -> Any:
    kind = kind or openai.OpenAI
    return kind(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60)


def raw_answer(server: Server) -> str:
    """What the server says to ASK without any package between. Which words those are depends on
    the kernels of the CPU: int8 inputs round differently where two words are nearly as likely."""
    answer = server.client.post("/v1/chat/completions", json=ASK).json()
    return str(answer["choices"][0]["message"]["content"])


def test_whole_and_streamed_and_asynchronous_answers_are_one(demo: Server):
    client = client_of(demo)
    assert [model.id for model in client.models.list()] == ["demo"]
    whole = client.chat.completions.create(**ASK)
    text = whole.choices[0].message.content
    assert text and text == raw_answer(demo)
    stream = client.chat.completions.create(
        **ASK, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == text
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert {chunk.id for chunk in chunks} == {chunks[0].id}

    async def ask_all() -> list[str]:
        async with client_of(demo, openai.AsyncOpenAI) as client:

            async def streamed() -> str:
                stream = await client.chat.completions.create(**ASK, stream=True)
                parts = [chunk.choices[0].delta.content or "" async for chunk in stream]
                return "".join(parts)

            async def plain() -> str:
                answer = await client.chat.completions.create(**ASK)
                return answer.choices[0].message.content

            return await asyncio.gather(*(way() for way in (streamed, plain) * 4))

    assert asyncio.run(ask_all()) == [text] * 8


def test_the_packages_own_stream_helper_puts_the_answer_together(demo: Server):
    with client_of(demo).chat.completions.stream(**ASK) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert {"chunk", "content.delta", "content.done"} <= kinds
    assert final.choices[0].message.content == raw_answer(demo)
    assert final.choices[0].finish_reason == "stop"


def test_completions_with_logprobs_echo_and_several_prompts(demo: Server):
    client = client_of(demo)
    answer = client.completions.create(
        model="demo", prompt=["The capital of France is", "Two and two is"], max_tokens=4,
        temperature=0, logprobs=2, echo=True, extra_body={"top_k": 5},
    )  # fmt: skip
    assert len(answer.choices) == 2 and "Paris" in answer.choices[0].text
    for choice in answer.choices:
        assert choice.logprobs.token_logprobs[0] is None
        assert len(choice.logprobs.tokens) == len(choice.logprobs.top_logprobs)
        assert "".join(choice.logprobs.tokens) == choice.text
    stream = client.completions.create(
        model="demo", prompt="The capital of France is", max_tokens=4, temperature=0, stream=True
    )
    said = "".join(chunk.choices[0].text for chunk in stream)
    assert answer.choices[0].text == "The capital of France is" + said


def test_vectors_are_the_same_as_floats_and_base64_and_mean_something(demo: Server):
    client = client_of(demo)
    texts = ["a cat sleeps on the sofa", "a kitten naps on the couch", "stock prices fell today"]
    # The package asks for base64 unless it is told otherwise.
    answer = client.embeddings.create(model="demo", input=texts)
    vectors = np.array([item.embedding for item in answer.data])
    assert [item.index for item in answer.data] == [0, 1, 2] and vectors.shape[1] == 576
    floats = client.embeddings.create(model="demo", input=texts, encoding_format="float")
    assert np.allclose([item.embedding for item in floats.data], vectors, atol=1e-6)
    raw = client.embeddings.create(model="demo", input=texts[0], encoding_format="base64")
    decoded = np.frombuffer(base64.b64decode(raw.data[0].embedding), dtype="<f4")
    assert np.allclose(decoded, vectors[0], atol=1e-6)
    assert answer.usage.prompt_tokens == answer.usage.total_tokens > 10
    one = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    assert one[0] @ one[1] > one[0] @ one[2]


def test_refusals_are_the_packages_own_errors(demo: Server):
    client = client_of(demo)
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**{**ASK, "temperature": 9})
    assert (caught.value.param, caught.value.code) == ("temperature", "invalid_request")
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(**{**ASK, "model": "gpt-9"})
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(**ASK, extra_body={"no_such_field": 1})
