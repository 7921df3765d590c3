"""Tool calls of a real engine: however the model's text is cut, and whatever ends it."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import pytest

from tests.cases.asking import CHAT, post
from tests.cases.conftest import alive
from tests.cases.scripts import random_split
from tests.fixtures import server
from tests.fixtures.scripted import ScriptedModel, scripted_model
from tests.fixtures.server import Server

CITY = 'Z{ü}"rich"\n</tool_call> <tool_call>\\'
ONE = '<tool_call>\n{"name": "get", "arguments": {"city": "Paris"}}\n</tool_call>'
HARD = json.dumps({"name": "get", "arguments": {"city": CITY}})  # writes ü as \\u00fc
TWO = (
    f"Let me look 😀.\n<tool_call>\n{HARD}\n</tool_call>\n"
    '<tool_call>\n{"name": "now", "arguments": {"zones": [1, {"x": null}]}}\n</tool_call>'
)
PLAIN = "No tool is needed: 2 < 3 <tool"
SAYINGS = (TWO, ONE, PLAIN)
TOOLS = [
    {
        "type": "function",
        "function": {"name": name, "parameters": {"type": "object", "properties": properties}},
    }
    for name, properties in (("get", {"city": {"type": "string"}}), ("now", {"zones": {}}))
]
NAMED = {"type": "function", "function": {"name": "get"}}


@pytest.fixture(scope="module")
def caller() -> ScriptedModel:
    rng = random.Random(11)
    return scripted_model("tools", [[*random_split(text.encode(), rng)] for text in SAYINGS])


@pytest.fixture(scope="module")
def calling_server(caller: ScriptedModel) -> Iterator[Server]:
    flags = ("--dtype", "float32", "--kv-cache-memory-bytes", "16MiB")
    flags += ("--enable-auto-tool-choice", "--tool-call-parser", "hermes")
    with server.start(caller.path, *flags) as running:
        yield running


@pytest.fixture
def calls(calling_server: Server) -> Iterator[Server]:
    yield from alive(calling_server)


def body(script: int, **fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": str(script)}]
    fields = {"temperature": 0, "max_tokens": 150, "tools": TOOLS, **fields}
    return {"messages": messages, **fields}


def heard(server: Server, **fields: Any) -> dict[str, Any]:
    """A stream put together; nothing is said after the end, and a call's index is its place."""
    said: dict[str, Any] = {"content": "", "calls": [], "reason": None, "logprobs": []}
    events = server.events(CHAT, **fields, stream_options={"include_usage": True})
    for event in events[:-1]:
        (choice,) = event["choices"]
        assert said["reason"] is None
        said["content"] += choice["delta"].get("content") or ""
        for part in choice["delta"].get("tool_calls") or []:
            if part["index"] == len(said["calls"]):
                said["calls"].append([part["id"], part["function"]["name"], ""])
            said["calls"][part["index"]][2] += part["function"].get("arguments", "")
        said["reason"] = choice["finish_reason"]
        said["logprobs"] += (choice["logprobs"] or {}).get("content", [])
    said["usage"] = events[-1]["usage"]["completion_tokens"]
    return said


def both_ways(server: Server, **fields: Any) -> dict[str, Any]:
    """What is said whole, which is what is said in a stream."""
    stream, answer = heard(server, **fields), post(server, CHAT, **fields)
    choice = answer["choices"][0]
    message = choice["message"]
    functions = [call["function"] for call in message.get("tool_calls") or []]
    found = [(f["name"], f["arguments"]) for f in functions]
    assert "tool_calls" not in message or found
    assert stream["content"] == (message["content"] or "")
    streamed = [(name, arguments) for _, name, arguments in stream["calls"]]
    if choice["finish_reason"] != "length":  # a call that was cut off is not in the whole answer
        assert streamed == found
        assert len({call[0] for call in stream["calls"]}) == len(found)
    assert streamed[: len(found)] == found
    assert stream["reason"] == choice["finish_reason"]
    assert stream["usage"] == answer["usage"]["completion_tokens"]
    logprobs = (choice["logprobs"] or {}).get("content", [])
    assert stream["logprobs"] == logprobs
    if fields.get("logprobs"):
        assert len(logprobs) == stream["usage"]
    calls = [(name, json.loads(arguments)) for name, arguments in found]
    return {"content": message["content"], "calls": calls, "reason": choice["finish_reason"]}


def test_calls_are_put_together_whatever_they_hold(calls: Server):
    """T24: braces, quotes, escapes and the marks themselves inside of arguments; T21: every token
    has its log-probability."""
    said = both_ways(calls, **body(0, logprobs=True, top_logprobs=2))
    assert said["content"].strip() == "Let me look 😀."
    assert said["calls"] == [("get", {"city": CITY}), ("now", {"zones": [1, {"x": None}]})]
    assert said["reason"] == "tool_calls"


def test_an_answer_cut_after_any_token_never_shows_a_broken_call(
    calls: Server, caller: ScriptedModel
):
    """T24, T25: cut off by max_tokens, the reason is length, and calls are whole or not there."""
    script = caller.scripts[0]
    for count in range(1, len(script.tokens) + 1, 3):
        said = both_ways(calls, **body(0, max_tokens=count))
        assert said["reason"] == "length"
        whole = b"".join(script.tokens[:count]).count(b"</tool_call>\n<tool") > 0
        assert len(said["calls"]) <= 1 + whole


# (tool_choice, script) -> (number of calls, finish_reason): the table of docs/tools.md.
REASONS: dict[tuple[str, int], tuple[int, str]] = {
    ("auto", 0): (2, "tool_calls"),
    ("auto", 1): (1, "tool_calls"),
    ("auto", 2): (0, "stop"),
    ("required", 1): (1, "tool_calls"),
    ("named", 1): (1, "stop"),
    ("none", 1): (0, "stop"),
    ("none", 2): (0, "stop"),
}


@pytest.mark.parametrize(("choice", "script"), REASONS, ids=str)
def test_the_reason_says_whether_there_are_calls(calls: Server, choice: str, script: int):
    """T25."""
    sent = NAMED if choice == "named" else choice
    said = both_ways(calls, **body(script, tool_choice=sent))
    assert (len(said["calls"]), said["reason"]) == REASONS[choice, script]
    if choice == "none" or script == 2:
        assert said["content"] == SAYINGS[script]
    cut = both_ways(calls, **body(script, tool_choice=sent, max_tokens=3))
    assert (cut["calls"], cut["reason"]) == ([], "length")
