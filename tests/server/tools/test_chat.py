"""The chat route with tools and reasoning, on the mock engine: streams add up to whole answers."""

from __future__ import annotations

import json
from typing import Any

import openai
import pydantic
import pytest

from octavo.server.tools.registry import FORMATS
from tests.server import mock_server

CHAT = "/v1/chat/completions"
TOOLS = [
    {
        "type": "function",
        "function": {"name": name, "parameters": {"type": "object", "properties": properties}},
    }
    for name, properties in (("get", {"city": {"type": "string"}}), ("now", {}))
]
GET = (
    '<tool_call>{"name": "get", "arguments": {"city": "P{\\"\\u00e9\\n}</tool_call>"}}</tool_call>'
)
NOW = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'
CITY = 'P{"é\n}</tool_call>'
CALLS = [("get", {"city": CITY}), ("now", {})]
ROOM = {"max_model_len": 4096, "step_seconds": 0.0}


@pytest.fixture(scope="module")
def hermes():
    flags = {
        "enable_auto_tool_choice": True,
        "tool_call_parser": "hermes",
        "reasoning_parser": "qwen3",
    }
    with mock_server.start(engine=ROOM, server=flags) as server:
        yield server


@pytest.fixture(scope="module")
def without():
    with mock_server.start(engine=ROOM) as server:
        yield server


def body(say: str, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": f"say:{say}"}], "tools": TOOLS, **fields}


def whole(server, say: str, **fields: Any) -> dict[str, Any]:
    answer = server.post(CHAT, **body(say, **fields))
    assert answer.status_code == 200, answer.text
    return answer.json()


def rebuilt(events: list[dict[str, Any]], index: int = 0) -> dict[str, Any]:
    """A choice out of a stream's events."""
    said: dict[str, Any] = {"content": "", "reasoning": "", "calls": {}, "tokens": 0, "ids": []}
    for event in events:
        for choice in event["choices"]:
            if choice["index"] != index:
                continue
            assert said.get("finish_reason") is None, "an event after the end"
            delta = choice["delta"]
            assert len(set(delta) - {"role", "reasoning_content"}) <= 1
            said["content"] += delta.get("content") or ""
            said["reasoning"] += delta.get("reasoning") or ""
            assert delta.get("reasoning") == delta.get("reasoning_content")
            for part in delta.get("tool_calls", ()):
                call = said["calls"].setdefault(part["index"], {"arguments": ""})
                if "id" in part:
                    assert "id" not in call
                    call |= {"id": part["id"], "name": part["function"]["name"]}
                call["arguments"] += part["function"]["arguments"]
            said["finish_reason"] = choice["finish_reason"]
            said["stop_reason"] = choice.get("stop_reason")
            said["tokens"] += len((choice["logprobs"] or {"content": []})["content"])
            said["ids"] += choice.get("token_ids", [])
    return said


def check_both_ways(server, say: str, **fields: Any) -> dict[str, Any]:
    """The whole answer's choice; the stream says the same, but for calls that came to nothing."""
    answer = whole(server, say, **fields)
    choice = answer["choices"][0]
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = server.events(CHAT, **body(say, **fields), stream_options=options)
    said = rebuilt(events)
    message = choice["message"]
    assert said["content"] == (message["content"] or "")
    assert said["reasoning"] == (message.get("reasoning") or "")
    assert said["finish_reason"] == choice["finish_reason"]
    assert said["stop_reason"] == choice["stop_reason"]
    calls = message.get("tool_calls", [])
    assert "tool_calls" not in message or calls
    good = []
    for call in said["calls"].values():
        try:
            json.loads(call["arguments"])
        except ValueError:
            continue
        good.append((call["name"], call["arguments"]))
    assert good == [(c["function"]["name"], c["function"]["arguments"]) for c in calls]
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == sorted(counts)
    assert events[-1]["usage"]["completion_tokens"] == answer["usage"]["completion_tokens"]
    return choice


def calls_of(choice: dict[str, Any]) -> list[tuple[str, Any]]:
    functions = [call["function"] for call in choice["message"].get("tool_calls", [])]
    return [(f["name"], json.loads(f["arguments"])) for f in functions]


@pytest.mark.parametrize(
    "say, content, calls, reason",
    [
        ("plain < text", "plain < text", [], "stop"),
        (f"Look: {GET} {NOW}", "Look:", CALLS, "tool_calls"),
        (NOW, None, [("now", {})], "tool_calls"),
        ("<tool_call>nothing", "<tool_call>nothing", [], "stop"),
        ('<tool_call>{"name": "get", "arguments": {"city": 1', None, [], "stop"),
    ],
)
def test_auto(hermes, say, content, calls, reason):
    choice = check_both_ways(hermes, say)
    assert calls_of(choice) == calls
    assert choice["message"]["content"] == (content or (None if calls else say))
    assert choice["finish_reason"] == reason
    ids = [call["id"] for call in choice["message"].get("tool_calls", [])]
    assert len(set(ids)) == len(ids) and all(one.startswith("call_") for one in ids)


def test_cut_by_length(hermes):
    """A call that is not whole is no call: its text is content, and the reason is length."""
    say = f"{NOW}{GET}"
    choice = check_both_ways(hermes, say, max_tokens=len(NOW) + 60)
    assert calls_of(choice) == [("now", {})]
    assert choice["message"]["content"] == say[len(NOW) : len(NOW) + 60]
    assert choice["finish_reason"] == "length"
    choice = check_both_ways(hermes, say, max_tokens=20)
    assert "tool_calls" not in choice["message"] and choice["finish_reason"] == "length"


@pytest.mark.parametrize("tool_choice", ["none", None])
def test_without_calls_to_read_text_stays_text(hermes, tool_choice):
    fields = {"tool_choice": tool_choice} if tool_choice else {"tools": None}
    choice = check_both_ways(hermes, NOW, **fields)
    assert choice["message"]["content"] == NOW and choice["finish_reason"] == "stop"


def test_one_call_is_enough_without_parallel_calls(hermes):
    choice = check_both_ways(hermes, NOW + GET, parallel_tool_calls=False)
    assert calls_of(choice) == [("now", {})] and choice["message"]["content"] is None


def test_a_stop_string_ends_a_call_before_it_is_whole(hermes):
    choice = check_both_ways(hermes, f"{NOW} {GET}", stop=["P{"])
    assert calls_of(choice) == [("now", {})]
    assert choice["message"]["content"].endswith('{"city": "')
    assert (choice["finish_reason"], choice["stop_reason"]) == ("tool_calls", "P{")


def test_reasoning_content_and_calls(hermes):
    say = f"<think>Hm <b> é</think>I look {NOW}"
    choice = check_both_ways(hermes, say)
    assert choice["message"]["reasoning"] == choice["message"]["reasoning_content"] == "Hm <b> é"
    assert choice["message"]["content"] == "I look" and calls_of(choice) == [("now", {})]
    choice = check_both_ways(hermes, say, include_reasoning=False)
    assert "reasoning" not in choice["message"] and choice["message"]["content"] == "I look"
    cut = check_both_ways(hermes, say, max_tokens=10)
    assert cut["message"]["content"] is None and cut["message"]["reasoning"] == "Hm "
    plain = check_both_ways(hermes, "Hi")
    assert plain["message"]["reasoning"] is None


def test_every_token_has_its_logprobs_and_ids(hermes):
    say = f"<think>a</think>b{NOW}c"
    options = {"logprobs": True, "top_logprobs": 1, "return_token_ids": True}
    choice = check_both_ways(hermes, say, **options)
    said = rebuilt(hermes.events(CHAT, **body(say, **options)))
    num_tokens = len(say.encode()) + 1
    assert said["tokens"] == len(choice["logprobs"]["content"]) == num_tokens
    assert said["ids"] == choice["token_ids"] and len(said["ids"]) == num_tokens


def test_several_choices(hermes):
    answer = whole(hermes, f"x {GET}", n=3)
    events = hermes.events(CHAT, **body(f"x {GET}", n=3))
    ids = set()
    for choice in answer["choices"]:
        assert calls_of(choice) == CALLS[:1] and choice["finish_reason"] == "tool_calls"
        said = rebuilt(events, choice["index"])
        assert json.loads(said["calls"][0]["arguments"]) == {"city": CITY}
        ids |= {said["calls"][0]["id"], choice["message"]["tool_calls"][0]["id"]}
    assert len(ids) == 6


def test_openais_client_puts_a_stream_together(hermes):
    client = openai.OpenAI(base_url=f"{hermes.url}/v1", api_key="x", max_retries=0)
    ask = {"model": "mock", **body(f"<think>t</think>Look {GET} {NOW}")}
    with client.chat.completions.stream(**ask) as stream:
        for _ in stream:
            pass
        message = stream.get_final_completion().choices[0].message
    expected = client.chat.completions.create(**ask).choices[0].message
    assert message.content == expected.content == "Look"
    for one in (message, expected):
        functions = [call.function for call in one.tool_calls]
        assert [(f.name, json.loads(f.arguments)) for f in functions] == CALLS
    # The answer, and the tool's, go back into a conversation.
    again = [*ask["messages"], expected.model_dump(exclude_none=True)]
    for call in expected.tool_calls:
        again.append({"role": "tool", "tool_call_id": call.id, "content": "12"})
    again += ask["messages"][:1]
    assert client.chat.completions.create(model="mock", messages=again, tools=TOOLS).choices


class get(pydantic.BaseModel):
    """Weather of a city."""

    city: str


def test_openais_client_parses_strict_functions(hermes):
    client = openai.OpenAI(base_url=f"{hermes.url}/v1", api_key="x", max_retries=0)
    tool = openai.pydantic_function_tool(get)
    assert tool["function"]["strict"]
    answer = client.chat.completions.parse(
        model="mock", messages=body(GET)["messages"], tools=[tool]
    )
    (call,) = answer.choices[0].message.tool_calls
    assert call.function.parsed_arguments == get(city=CITY)


# Format -> what to say in a vocabulary that has its marks as special tokens.
AS_TOKENS = {
    "hermes": '<tool_call>\n{"name": "get", "arguments": @}\n</tool_call>\n<tool_call>\n'
    '{"name": "now", "arguments": {}}\n</tool_call>',
    "mistral": "[TOOL_CALLS]get[ARGS]@[TOOL_CALLS]now[ARGS]{}",
    "deepseek_v3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get<｜tool▁sep｜>@"
    "<｜tool▁call▁end｜><｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "openai": "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary"
    "<|message|>I look.<|end|><|start|>assistant<|channel|>commentary to=functions.get "
    "<|constrain|>json<|message|>@<|call|><|start|>assistant<|channel|>commentary "
    "to=functions.now <|constrain|>json<|message|>{}",
}


ARGUMENTS = json.dumps({"city": CITY}).replace("<", "\\u003c")


@pytest.mark.parametrize("name", AS_TOKENS)
def test_marks_that_are_special_tokens_are_read_and_never_shown(name):
    marks = FORMATS[name].MARKS
    flags = {"enable_auto_tool_choice": True, "tool_call_parser": name}
    template = mock_server.TEMPLATE
    if name == "openai":
        template = template.replace("assistant: ", "<|start|>assistant")
    with mock_server.start(engine=ROOM, server=flags, marks=marks, template=template) as server:
        prefix = "" if name == "openai" else "I look."
        text = prefix + AS_TOKENS[name].replace("@", ARGUMENTS)
        for fields in ({}, {"skip_special_tokens": False}):
            choice = check_both_ways(server, mock_server.said(text, marks), **fields)
            assert calls_of(choice) == CALLS
            assert choice["message"]["content"] == "I look."
            assert choice["finish_reason"] == "tool_calls"
        if name == "openai":
            assert choice["message"]["reasoning"] == "Hm."
        # Text that spells the marks is text; a stop string may name a mark.
        spelled = mock_server.said("I " + marks[0])
        assert check_both_ways(server, spelled)["message"]["content"] == "I " + marks[0]
        stopped = check_both_ways(server, mock_server.said(text, marks), stop=[marks[0]])
        assert stopped["stop_reason"] == marks[0] and "tool_calls" not in stopped["message"]
        plain = whole(server, mock_server.said(text, marks), tool_choice="none")
        shown = plain["choices"][0]["message"]["content"]
        assert not any(mark in shown for mark in marks)


def test_the_prompt_says_whether_an_answer_begins_inside_of_reasoning():
    """As templates of hybrid models do: they open reasoning, or write it empty."""
    marks = ("<think>", "</think>", "<|turn|>")
    template = mock_server.TEMPLATE.replace(
        "assistant: ",
        "<|turn|>{% if enable_thinking is false %}<think>\n\n</think>\n\n"
        "{% elif enable_thinking %}<think>\n{% endif %}",
    )
    ask = {"messages": [{"role": "user", "content": mock_server.said("say:a</think>b", marks)}]}
    for parser, default in (("qwen3", "ab"), ("deepseek_r1", "b")):
        flags = {"reasoning_parser": parser}
        with mock_server.start(engine=ROOM, server=flags, marks=marks, template=template) as server:
            for thinks, content in ((True, "b"), (False, "ab"), (None, default)):
                fields = {} if thinks is None else {"enable_thinking": thinks}
                answer = server.post(CHAT, **ask, chat_template_kwargs=fields).json()
                message = answer["choices"][0]["message"]
                assert message["content"] == content
                assert message["reasoning"] == ("a" if content == "b" else None)


def test_a_choice_left_to_the_model_needs_flags(without):
    for fields in ({}, {"tool_choice": "auto"}):
        answer = without.post(CHAT, **body("x", **fields))
        error = answer.json()["error"]
        assert answer.status_code == 400 and error["param"] == (
            "tool_choice" if fields else "tools"
        )
        assert "--enable-auto-tool-choice" in error["message"]
        assert "--tool-call-parser" in error["message"]
    assert whole(without, "x", tool_choice="none")["choices"][0]["message"]["content"] == "x"


def tool(**function: Any) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": "f", **function}}]


CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
ASSISTANT = {"role": "assistant", "content": None, "tool_calls": [CALL]}


@pytest.mark.parametrize(
    "fields, param, part",
    [
        ({"tools": [{"type": "function"}]}, "tools", "tools[0].function"),
        ({"tools": [{"type": "code", "function": {}}]}, "tools", "tools[0].type"),
        ({"tools": tool(name="a b")}, "tools", "tools[0].function.name"),
        ({"tools": tool(name="")}, "tools", "tools[0].function.name"),
        ({"tools": tool(name=7)}, "tools", "tools[0].function.name"),
        ({"tools": tool() + tool()}, "tools", "two of tools"),
        ({"tools": tool(parameters=[])}, "tools", "tools[0].function.parameters"),
        ({"tools": tool(parameters={"type": "array"})}, "tools", "parameters.type"),
        ({"tools": tool(parameters={"properties": {"a": 1}})}, "tools", "properties.a"),
        ({"tools": tool(parameters={"required": "a"})}, "tools", "parameters.required"),
        ({"tools": tool(strict="yes")}, "tools", "strict"),
        ({"tools": tool(), "tool_choice": "always"}, "tool_choice", "'required'"),
        ({"tools": tool(), "tool_choice": {"type": "function"}}, "tool_choice", "'required'"),
        (
            {"tools": tool(), "tool_choice": {"type": "function", "function": {"name": "g"}}},
            "tool_choice",
            "'g'",
        ),
        ({"tool_choice": "required"}, "tool_choice", "needs tools"),
        ({"tools": [], "tool_choice": "auto"}, "tool_choice", "needs tools"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages", "no tool was called"),
        (
            {"messages": [ASSISTANT, {"role": "tool", "tool_call_id": "b", "content": "x"}]},
            "messages",
            "'b'",
        ),
        ({"messages": [{**ASSISTANT, "role": "user"}]}, "messages", "messages[0]"),
    ],
)
def test_what_is_wrong_with_tools_is_said_before_anything_runs(hermes, fields, param, part):
    for stream in (False, True):
        ask = {"messages": [{"role": "user", "content": "say:x"}], **fields, "stream": stream}
        answer = hermes.post(CHAT, **ask)
        error = answer.json()["error"]
        assert answer.status_code == 400, answer.text
        assert error["param"] == param and part in error["message"], error


def test_tools_are_described_to_a_model_whose_template_knows_none():
    template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant: "
    flags = {"enable_auto_tool_choice": True, "tool_call_parser": "auto"}
    with mock_server.start(engine=ROOM, server=flags, template=template) as server:
        say = '{"name": "get", "arguments": {"city": "x"}}'
        choice = whole(server, say)["choices"][0]
        assert calls_of(choice) == [("get", {"city": "x"})]
        messages = [
            {"role": "user", "content": "a"},
            {**ASSISTANT, "content": "Look."},
            {"role": "tool", "tool_call_id": "a", "content": "12"},
        ]
        ids = server.post("/tokenize", messages=messages, tools=TOOLS).json()["tokens"]
        text = bytes(i for i in ids if i < 256).decode()
        assert '"name": "get"' in text.partition("user:")[0]
        assert (
            'assistant: Look.\n{"name": "f", "arguments": {}}\nuser: The result of a:\n12' in text
        )
        none = server.post("/tokenize", messages=messages).json()["tokens"]
        assert b"You can call" not in bytes(i for i in none if i < 256)
