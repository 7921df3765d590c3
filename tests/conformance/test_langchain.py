"""langchain-openai: one tool loop, and a structured answer in both of its ways."""

from __future__ import annotations

from typing import Any

import pytest

from tests.conformance import weather
from tests.fixtures.server import Server

langchain_openai = pytest.importorskip(
    "langchain_openai", reason="langchain-openai is not installed: make conformance"
)
pytestmark = pytest.mark.conformance


def model_of(server: Server) -> Any:
    return langchain_openai.ChatOpenAI(
        model="scripted", base_url=f"{server.url}/v1", api_key="none", temperature=0,
        max_tokens=200, max_retries=0, stream_usage=True,
    )  # fmt: skip


@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_loop(scripted: Server, stream: bool):
    from langchain_core.messages import HumanMessage
    from langchain_core.tools import tool

    get_weather = tool(weather.get_weather)
    bound = model_of(scripted).bind_tools([get_weather])
    messages: list[Any] = [HumanMessage(weather.QUESTION)]
    if stream:
        first, *others = bound.stream(messages)
        for other in others:
            first += other
        said = first
    else:
        said = bound.invoke(messages)
    (call,) = said.tool_calls
    assert (call["name"], call["args"]) == ("get_weather", weather.ARGUMENTS)
    assert said.usage_metadata["output_tokens"] > 5
    result = get_weather.invoke(call)
    assert result.content == weather.RESULT
    assert bound.invoke([*messages, said, result]).content == weather.ANSWER


def test_a_prompt_that_is_too_long_is_told_apart(scripted: Server):
    """Applications shorten their prompt for this error and no other."""
    from langchain_core.exceptions import ContextOverflowError

    with pytest.raises(ContextOverflowError, match="tokens"):
        model_of(scripted).invoke("x" * 9000)


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_a_structured_answer(scripted: Server, method: str):
    asked = model_of(scripted).with_structured_output(weather.Weather, method=method)
    assert asked.invoke(weather.QUESTION) == weather.Weather(**weather.ARGUMENTS)
