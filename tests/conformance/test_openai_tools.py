"""OpenAI's own package: a tool loop, and answers and arguments of a pydantic model."""

from __future__ import annotations

import json
from typing import Any, Literal

import pytest
from pydantic import BaseModel, Field

from tests.conformance import weather
from tests.conformance.test_openai import client_of
from tests.fixtures.server import Server

openai = pytest.importorskip("openai", reason="openai is not installed: make conformance")
pytestmark = pytest.mark.conformance

ASKED: list[Any] = [{"role": "user", "content": weather.QUESTION}]
FIELDS: dict[str, Any] = {"model": "scripted", "temperature": 0, "max_tokens": 200}


def check_loop(client: Any, message: dict[str, Any]) -> None:
    """``message`` calls the tool; its result is sent back, and answered."""
    (call,) = message["tool_calls"]
    assert not message.get("content") and call["function"]["name"] == "get_weather"
    arguments = json.loads(call["function"]["arguments"])
    result = {
        "role": "tool",
        "tool_call_id": call["id"],
        "content": weather.get_weather(**arguments),
    }
    answer = client.chat.completions.create(
        messages=[*ASKED, message, result], tools=[weather.TOOL], **FIELDS
    )
    assert answer.choices[0].message.content == weather.ANSWER
    assert answer.choices[0].finish_reason == "stop"


def test_a_tool_is_called_and_its_result_answered(scripted: Server):
    client = client_of(scripted)
    answer = client.chat.completions.create(messages=ASKED, tools=[weather.TOOL], **FIELDS)
    assert answer.choices[0].finish_reason == "tool_calls"
    check_loop(client, answer.choices[0].message.model_dump())


def test_a_streamed_call_is_put_together(scripted: Server):
    client = client_of(scripted)
    with client.chat.completions.stream(
        messages=ASKED, tools=[weather.TOOL], stream_options={"include_usage": True}, **FIELDS
    ) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert {"chunk", "tool_calls.function.arguments.done"} <= kinds
    assert final.choices[0].finish_reason == "tool_calls" and final.usage.completion_tokens > 5
    message = final.choices[0].message.model_dump(exclude={"parsed"})
    for call in message["tool_calls"]:
        call["function"].pop("parsed_arguments", None)
    check_loop(client, message)


@pytest.mark.parametrize(
    "choice", ["auto", "required", {"type": "function", "function": {"name": "get_weather"}}]
)
def test_every_choice_gives_a_call(scripted: Server, choice: Any):
    client = client_of(scripted)
    answer = client.chat.completions.create(
        messages=ASKED, tools=[weather.TOOL], tool_choice=choice, **FIELDS
    )
    (call,) = answer.choices[0].message.tool_calls
    assert json.loads(call.function.arguments) == weather.ARGUMENTS


def test_parse_gives_a_pydantic_model(scripted: Server):
    completions = client_of(scripted).chat.completions
    answer = completions.parse(messages=ASKED, response_format=weather.Weather, **FIELDS)
    assert answer.choices[0].message.parsed == weather.Weather(**weather.ARGUMENTS)
    with completions.stream(messages=ASKED, response_format=weather.Weather, **FIELDS) as stream:
        assert stream.get_final_completion().choices[0].message.parsed == weather.Weather(
            **weather.ARGUMENTS
        )


def test_parse_gives_the_arguments_of_a_strict_tool(scripted: Server):
    answer = client_of(scripted).chat.completions.parse(
        messages=ASKED, tools=[openai.pydantic_function_tool(weather.Weather)], **FIELDS
    )
    (call,) = answer.choices[0].message.tool_calls
    assert call.function.parsed_arguments == weather.Weather(**weather.ARGUMENTS)


class Plan(BaseModel):
    """Small enough that any model completes it, whatever white space it likes: 15 places have at
    most 42 characters of that each."""

    colour: Literal["red", "green", "blue"]
    number: Literal[1, 2, 3]
    done: bool
    words: list[Literal["a", "b"]] = Field(max_length=3)


def test_a_real_model_is_held_to_the_schema(demo: Server):
    """At a temperature where it would say anything."""
    completions = client_of(demo).chat.completions
    for seed in range(3):
        answer = completions.parse(
            model="demo", messages=[{"role": "user", "content": "Choose a colour."}],
            response_format=Plan, temperature=1.5, seed=seed, max_tokens=800,
        )  # fmt: skip
        assert isinstance(answer.choices[0].message.parsed, Plan)
