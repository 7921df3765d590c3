"""llama-index's OpenAILike: one tool loop and one structured answer."""

from __future__ import annotations

from typing import Any

import pytest

from tests.conformance import weather
from tests.fixtures.server import Server

openai_like = pytest.importorskip(
    "llama_index.llms.openai_like",
    reason="llama-index-llms-openai-like is not installed: make conformance",
)
pytestmark = pytest.mark.conformance


def model_of(server: Server) -> Any:
    return openai_like.OpenAILike(
        model="scripted", api_base=f"{server.url}/v1", api_key="none", temperature=0,
        max_tokens=200, max_retries=0, context_window=4096, is_chat_model=True,
        is_function_calling_model=True,
    )  # fmt: skip


def test_a_tool_loop(scripted: Server):
    from llama_index.core.llms import ChatMessage
    from llama_index.core.tools import FunctionTool

    model, tool = model_of(scripted), FunctionTool.from_defaults(fn=weather.get_weather)
    asked = ChatMessage(role="user", content=weather.QUESTION)
    said = model.chat_with_tools([tool], chat_history=[asked])
    (call,) = model.get_tool_calls_from_response(said)
    assert (call.tool_name, call.tool_kwargs) == ("get_weather", weather.ARGUMENTS)
    result = ChatMessage(
        role="tool",
        content=tool(**call.tool_kwargs).content,
        additional_kwargs={"tool_call_id": call.tool_id},
    )
    final = model.chat_with_tools([tool], chat_history=[asked, said.message, result])
    assert final.message.content == weather.ANSWER


def test_a_structured_answer(scripted: Server):
    from llama_index.core.llms import ChatMessage

    structured = model_of(scripted).as_structured_llm(weather.Weather)
    answer = structured.chat([ChatMessage(role="user", content=weather.QUESTION)])
    assert answer.raw == weather.Weather(**weather.ARGUMENTS)
