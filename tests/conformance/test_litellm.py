"""litellm, to which octavo is any OpenAI-compatible server: a tool loop and a structured answer."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest

from tests.conformance import weather
from tests.fixtures.server import Server

os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # else it asks the network at import
litellm = pytest.importorskip("litellm", reason="litellm is not installed: make conformance")
pytestmark = pytest.mark.conformance

ASKED: list[Any] = [{"role": "user", "content": weather.QUESTION}]


def ask(server: Server, messages: list[Any], **fields: Any) -> Any:
    return litellm.completion(
        model="openai/scripted", api_base=f"{server.url}/v1", api_key="none", messages=messages,
        temperature=0, max_tokens=200, num_retries=0, **fields,
    )  # fmt: skip


@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_loop(scripted: Server, stream: bool):
    answer = ask(scripted, ASKED, tools=[weather.TOOL], stream=stream)
    if stream:
        answer = litellm.stream_chunk_builder(list(answer), messages=ASKED)
    assert answer.choices[0].finish_reason == "tool_calls"
    message = answer.choices[0].message
    (call,) = message.tool_calls
    arguments = json.loads(call.function.arguments)
    result = {
        "role": "tool",
        "tool_call_id": call.id,
        "content": weather.get_weather(**arguments),
    }
    final = ask(scripted, [*ASKED, message, result], tools=[weather.TOOL])
    assert final.choices[0].message.content == weather.ANSWER


def test_a_prompt_that_is_too_long_is_told_apart(scripted: Server):
    """litellm's fallbacks to models with more room look for this error."""
    with pytest.raises(litellm.ContextWindowExceededError, match="tokens"):
        ask(scripted, [{"role": "user", "content": "x" * 9000}])


def test_a_structured_answer(scripted: Server):
    answer = ask(scripted, ASKED, response_format=weather.Weather)
    found = weather.Weather.model_validate_json(answer.choices[0].message.content)
    assert found == weather.Weather(**weather.ARGUMENTS)
