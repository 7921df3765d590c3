"""Tools on a real engine: what scripted and random models say is read, and constrained."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import jsonschema_rs
import pytest

from tests.fixtures import server
from tests.fixtures.scripted import scripted_model
from tests.fixtures.server import Server
from tests.server.tools.test_chat import rebuilt

CHAT = "/v1/chat/completions"
SMALL = ("--dtype", "float32", "--kv-cache-memory-bytes", "16MiB")
AUTO = ("--enable-auto-tool-choice", "--tool-call-parser")
SCHEMAS: dict[str, dict[str, Any]] = {
    "look": {
        "type": "object",
        "properties": {
            "unit": {"enum": ["C", "F"]},
            "days": {"type": "integer", "minimum": 1, "maximum": 9},
            "exact": {"type": "boolean"},
        },
        "required": ["unit", "days"],
        "additionalProperties": False,
    },
    "now": {},
}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": schema}}
    for name, schema in SCHEMAS.items()
]
HARD = '{"path": "a\\"}{[", "text": "\\u00e9 </tool_call>\\n{\\"x\\": 1}"}'
SAID = (
    f'I look, twice.\n<tool_call>\n{{"name": "look", "arguments": {HARD}}}\n</tool_call>\n'
    f'<tool_call>\n{{"name": "now", "arguments": {{"q": "</tool_call>"}}}}\n</tool_call>'
)
UNKNOWN = 'Ok.\n<tool_call>\n{"name": "now", "arguments": {"q": "é"}}\n</tool_call>'


def post(running: Server, **fields: Any) -> dict[str, Any]:
    answer = running.client.post(CHAT, json=fields)
    assert answer.status_code == 200, answer.text
    return answer.json()


def post_tokens(running: Server, text: str) -> list[int]:
    body = {"prompt": text, "add_special_tokens": False}
    return running.client.post("/tokenize", json=body).json()["tokens"]


def calls_of(choice: dict[str, Any]) -> list[tuple[str, Any]]:
    functions = [call["function"] for call in choice["message"].get("tool_calls", [])]
    return [(f["name"], json.loads(f["arguments"])) for f in functions]


# ---- T24: a scripted model ----


@pytest.fixture(scope="module")
def scripted() -> Iterator[Server]:
    """Says ``SAID``, or ``UNKNOWN``, in tokens of three characters."""
    texts = (SAID, UNKNOWN)
    model = scripted_model(
        "tools", [[text[start : start + 3] for start in range(0, len(text), 3)] for text in texts]
    )
    with server.start(model.path, *SMALL, *AUTO, "hermes") as running:
        yield running


def test_scripted_calls_are_the_same_streamed_and_whole(scripted):
    """T24: a preface and two calls, with braces, quotes, escapes and the end mark in arguments."""
    ask = {"messages": [{"role": "user", "content": "0"}], "tools": TOOLS, "temperature": 0}
    choice = post(scripted, **ask)["choices"][0]
    expected = [
        ("look", {"path": 'a"}{[', "text": 'é </tool_call>\n{"x": 1}'}),
        ("now", {"q": "</tool_call>"}),
    ]
    assert calls_of(choice) == expected
    assert choice["message"]["content"] == "I look, twice."
    assert choice["finish_reason"] == "tool_calls"
    said = rebuilt(scripted.events(CHAT, **ask))
    assert [call["arguments"] for call in said["calls"].values()] == [
        call["function"]["arguments"] for call in choice["message"]["tool_calls"]
    ]
    assert said["content"] == "I look, twice." and said["finish_reason"] == "tool_calls"


def test_a_strict_function_gets_what_its_schema_says_though_the_choice_is_free(scripted):
    """The script calls with an argument that the schema of ``now`` does not know."""
    ask = {"messages": [{"role": "user", "content": "1"}], "temperature": 0, "max_tokens": 200}
    for strict, arguments in ((False, {"q": "é"}), (True, {})):
        now = {"name": "now", "parameters": {}, "strict": strict}
        choice = post(scripted, **ask, tools=[{"type": "function", "function": now}])["choices"][0]
        assert calls_of(choice)[0] == ("now", arguments)
        assert choice["message"]["content"].startswith("Ok.")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("tool_choice", ["auto", "none"])
@pytest.mark.parametrize("max_tokens", [None, 3, 30])
def test_finish_reason_follows_one_table(scripted, tool_choice, max_tokens, stream):
    """T25, as far as a scripted model can be told what to say."""
    ask = {
        "messages": [{"role": "user", "content": "0"}], "tools": TOOLS, "temperature": 0,
        "tool_choice": tool_choice, "max_tokens": max_tokens,
    }  # fmt: skip
    if stream:
        said = rebuilt(scripted.events(CHAT, **ask))
        reason, content = said["finish_reason"], said["content"]
    else:
        choice = post(scripted, **ask)["choices"][0]
        assert choice["message"].get("tool_calls") != []
        reason, content = choice["finish_reason"], choice["message"]["content"]
    expected = "length" if max_tokens else "tool_calls" if tool_choice == "auto" else "stop"
    assert reason == expected
    assert content.startswith("I look")


THOUGHT = ['Hm {"a"', ": 1}, <b>.\n", "</think>", "\n\n", '{"ok', '": ', "12}"]


def test_a_constraint_begins_after_reasoning():
    """The script's answer is not what the schema says; its reasoning is nobody's business."""
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"],
              "additionalProperties": False}  # fmt: skip
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema, "strict": True}}
    ask = {"messages": [{"role": "user", "content": "0"}], "temperature": 0, "max_tokens": 200}
    model = scripted_model("thinks", [[*THOUGHT]])
    with server.start(model.path, *SMALL, "--reasoning-parser", "deepseek_r1") as running:
        free = post(running, **ask)["choices"][0]["message"]
        assert (free["reasoning"], free["content"]) == ('Hm {"a": 1}, <b>.', '{"ok": 12}')
        choice = post(running, **ask, response_format=form)["choices"][0]
        assert choice["message"]["reasoning"] == 'Hm {"a": 1}, <b>.'
        jsonschema_rs.Draft202012Validator(schema).validate(
            json.loads(choice["message"]["content"])
        )
        said = rebuilt(running.events(CHAT, **ask, response_format=form))
        assert said["content"] == choice["message"]["content"]
        assert said["reasoning"] == choice["message"]["reasoning"]
        assert said["finish_reason"] == choice["finish_reason"] == "stop"


# ---- random weights ----


@pytest.fixture(scope="module")
def random_hermes(model_r) -> Iterator[Server]:
    flags = (*AUTO, "hermes", "--reasoning-parser", "qwen3")
    with server.start(model_r, *SMALL, *flags) as running:
        yield running


@pytest.fixture
def random_json(server_r) -> Server:
    """Without flags: the schema-driven format."""
    return server_r


@pytest.mark.parametrize("which", ["random_json", "random_hermes"])
@pytest.mark.parametrize("named", [False, True])
def test_any_model_calls_when_it_must(which, named, request):
    running = request.getfixturevalue(which)
    choice_of = {"type": "function", "function": {"name": "look"}}
    ask = {
        "messages": [{"role": "user", "content": "hi"}],
        "tools": TOOLS,
        "tool_choice": choice_of if named else "required",
        "temperature": 1.0,
        "max_tokens": 400,
        "parallel_tool_calls": False,
    }
    for seed in range(2):
        answer = post(running, **ask, seed=seed)
        choice = answer["choices"][0]
        (call,) = calls_of(choice)
        jsonschema_rs.Draft202012Validator(SCHEMAS[call[0]]).validate(call[1])
        assert choice["message"]["content"] is None
        assert choice["finish_reason"] == ("stop" if named else "tool_calls")
        assert not named or call[0] == "look"
        said = rebuilt(running.events(CHAT, **ask, seed=seed))
        assert said["finish_reason"] == choice["finish_reason"]
        assert said["content"] == ""
        (streamed,) = said["calls"].values()
        assert (streamed["name"], json.loads(streamed["arguments"])) == call


def test_a_forced_call_cut_by_length_is_no_call(random_json):
    ask = {"messages": [{"role": "user", "content": "hi"}], "tools": TOOLS, "max_tokens": 4}
    ask["temperature"] = 0
    choice = post(random_json, **ask, tool_choice="required")["choices"][0]
    assert choice["finish_reason"] == "length" and "tool_calls" not in choice["message"]
    said = rebuilt(random_json.events(CHAT, **ask, tool_choice="required"))
    assert said["finish_reason"] == "length"
    assert said["content"] == choice["message"]["content"]


@pytest.mark.parametrize(
    "fields, param, part",
    [
        (
            {"tool_choice": "required", "response_format": {"type": "json_object"}},
            "tool_choice",
            "json_object",
        ),
        (
            {"tool_choice": "required", "use_beam_search": True, "n": 2},
            "tool_choice",
            "use_beam_search",
        ),
    ],
)
def test_what_excludes_a_forced_call_is_refused(random_json, fields, param, part):
    ask = {"messages": [{"role": "user", "content": "hi"}], "tools": TOOLS, "max_tokens": 4}
    answer = random_json.client.post(CHAT, json={**ask, **fields})
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["param"] == param and part in error["message"]


def test_schemas_that_cannot_be_enforced(random_json):
    """Of a strict function it is an error; of another the rest is enforced."""
    schema = {
        "properties": {"a": {"type": "array", "items": {"enum": [1, 2]}, "uniqueItems": True,
                             "maxItems": 2}},
        "required": ["a"],
    }  # fmt: skip
    for strict in (True, False):
        function = {"name": "f", "parameters": schema, "strict": strict}
        ask = {
            "messages": [{"role": "user", "content": "hi"}],
            "tools": [{"type": "function", "function": function}],
            "tool_choice": "required", "max_tokens": 300, "parallel_tool_calls": False,
        }  # fmt: skip
        answer = random_json.client.post(CHAT, json=ask)
        if strict:
            error = answer.json()["error"]
            assert answer.status_code == 400 and error["param"] == "tools"
            assert "uniqueItems" in error["message"]
        else:
            ((name, arguments),) = calls_of(answer.json()["choices"][0])
            assert name == "f" and set(arguments["a"]) <= {1, 2}


def test_json_or_calls_where_both_are_asked_for(random_hermes):
    """``response_format`` with ``auto``: the answer is JSON of the schema, or calls."""
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"],
              "additionalProperties": False}  # fmt: skip
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema, "strict": True}}
    (mark,) = post_tokens(random_hermes, "<")
    for seed in range(4):
        calling = seed % 2 == 0  # the bias has the model begin with the mark of a call
        ask = {
            "messages": [{"role": "user", "content": "hi"}], "tools": TOOLS, "max_tokens": 400,
            "response_format": form, "seed": seed, "temperature": 2.0,
            "parallel_tool_calls": False, "logit_bias": {str(mark): 100} if calling else {},
        }  # fmt: skip
        choice = post(random_hermes, **ask)["choices"][0]
        if calling or "tool_calls" in choice["message"]:
            ((name, arguments),) = calls_of(choice)
            jsonschema_rs.Draft202012Validator(SCHEMAS[name]).validate(arguments)
        else:
            jsonschema_rs.Draft202012Validator(schema).validate(
                json.loads(choice["message"]["content"])
            )
