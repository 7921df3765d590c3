"""Answers whose calls are objects of JSON."""

from __future__ import annotations

from tests.server.tools.case import HARD, HARD_VALUE, Case, W


def hermes_call(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


HERMES = [
    Case(
        "hermes", "Just text, no <call> and 1 < 2.\n", content="Just text, no <call> and 1 < 2.\n"
    ),
    Case("hermes", "  \n", content="  \n"),
    Case("hermes", "", content=""),
    Case("hermes", hermes_call(W, '{"city": "Paris"}'), [(W, {"city": "Paris"})]),
    Case("hermes", hermes_call("write", HARD), [("write", HARD_VALUE)]),
    Case("hermes", "I look.\n\n" + hermes_call("now", "{}"), [("now", {})], "I look."),
    Case(
        "hermes",
        hermes_call(W, '{"city": "Łódź"}')
        + "\n"
        + hermes_call("now", "{ }")
        + "\n"
        + hermes_call("write", HARD)
        + "\n",
        [(W, {"city": "Łódź"}), ("now", {}), ("write", HARD_VALUE)],
    ),
    Case(
        "hermes",
        "a " + hermes_call("now", "{}") + "\nand\n" + hermes_call("now", "{}") + " after ",
        [("now", {}), ("now", {})],
        "a\nand after ",
    ),
    # The arguments first, as a string, absent, null, after an unknown member, on one line.
    Case(
        "hermes",
        '<tool_call>{"arguments": {"city": "A"}, "name": "get_weather"}</tool_call>'
        '<tool_call>{"name": "get_weather", "arguments": "{\\"city\\": \\"B\\"}"}</tool_call>'
        '<tool_call>{"name": "now"}</tool_call><tool_call>{"name":"now","arguments":null}'
        '</tool_call><tool_call>{"id": [1, "x"], "name": "now", "parameters": {}}</tool_call>',
        [(W, {"city": "A"}), (W, {"city": "B"}), ("now", {}), ("now", {}), ("now", {})],
    ),
    # A line break that JSON forbids; no end mark; a brace too many.
    Case(
        "hermes",
        '<tool_call>{"name": "write", "arguments": {"text": "a\nb\t"}}',
        [("write", {"text": "a\nb\t"})],
    ),
    Case("hermes", '<tool_call>{"name": "now", "arguments": {}}}</tool_call>', [("now", {})]),
    # Malformed: the raw text is content, and what follows is read.
    Case(
        "hermes", "<tool_call>not a call</tool_call>", content="<tool_call>not a call</tool_call>"
    ),
    Case(
        "hermes",
        '<tool_call>{"name": "now", "arguments": [1]}</tool_call>',
        content='<tool_call>{"name": "now", "arguments": [1]}</tool_call>',
    ),
    Case(
        "hermes",
        '<tool_call>{"name": "now", "arguments": {"a": tru}}</tool_call>'
        + hermes_call("now", "{}"),
        [("now", {})],
        '<tool_call>{"name": "now", "arguments": {"a": tru}}</tool_call>',
        num_broken=1,
    ),
    Case(
        "hermes",
        '<tool_call>{"name": "write", "arguments": {"text": "cut he',
        content='<tool_call>{"name": "write", "arguments": {"text": "cut he',
        num_broken=1,
    ),
    Case("hermes", "text <tool_cal", content="text <tool_cal"),
    Case(
        "hermes",
        "<think>\nLook <b>\n\n</think>\n\nOk\n" + hermes_call("now", "{}"),
        [("now", {})],
        "Ok",
        "Look <b>",
        "qwen3",
    ),
    Case(
        "hermes",
        "deep\n</think>\n\n" + hermes_call("now", "{}"),
        [("now", {})],
        "",
        "deep",
        "deepseek_r1",
    ),
    Case("hermes", "deep", reasoning="deep", reasoning_parser="qwen3", inside=True),
    Case(
        "hermes",
        "<think>a</think>b",
        content="b",
        reasoning="a",
        reasoning_parser="qwen3",
        inside=False,
    ),
    Case(
        "hermes", "a</think>b", content="a</think>b", reasoning_parser="deepseek_r1", inside=False
    ),
    Case("hermes", "\n<think>\n\n</think>\n\nHi", content="Hi", reasoning_parser="qwen3"),
    Case("hermes", "Hi <think>a</think>", content="Hi <think>a</think>", reasoning_parser="qwen3"),
]

GRANITE = [
    Case("granite", '<|tool_call|>[{"name": "now", "arguments": {}}]', [("now", {})]),
    Case(
        "granite",
        '<|tool_call|> [{"name": "get_weather", "arguments": {"city": "a]"}}, '
        '{"name": "write", "arguments": ' + HARD + "}]",
        [(W, {"city": "a]"}), ("write", HARD_VALUE)],
    ),
    Case("granite", '<tool_call>[{"name": "now", "arguments": {}}]\nDone', [("now", {})], "\nDone"),
    Case("granite", "<|tool_call|>[]", content="<|tool_call|>[]"),
    Case(
        "granite",
        '<|tool_call|>[{"name": "now", "arguments": {}}, {"name": 3}] x',
        [("now", {})],
        '{"name": 3}] x',
    ),
    Case(
        "granite",
        'Here is my thought process:\nHm: "<a>"\n\nHere is my response:\nYes\n'
        '<|tool_call|>[{"name": "now", "arguments": {}}]',
        [("now", {})],
        "Yes",
        'Hm: "<a>"',
        "granite",
    ),
    Case(
        "granite",
        "Here's my thought process: a Here's my response: b",
        content=" b",
        reasoning=" a ",
        reasoning_parser="granite",
    ),
    Case(
        "granite",
        "Here is my response: b",
        content="Here is my response: b",
        reasoning_parser="granite",
    ),
    Case(
        "granite",
        "<think>a</think><response>b</response>",
        content="b",
        reasoning="a",
        reasoning_parser="granite",
    ),
]

MISTRAL = [
    Case(
        "mistral",
        '[TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "[/"}}, '
        '{"name": "write", "arguments": ' + HARD + "}]",
        [(W, {"city": "[/"}), ("write", HARD_VALUE)],
    ),
    Case(
        "mistral",
        '[TOOL_CALLS] [{"name": "now", "arguments": {}, "id": "abcdefghi"}]',
        [("now", {})],
    ),
    Case(
        "mistral",
        "Hm. [TOOL_CALLS]write[ARGS]" + HARD + "[TOOL_CALLS]now[ARGS]{}",
        [("write", HARD_VALUE), ("now", {})],
        "Hm.",
    ),
    Case(
        "mistral",
        '[TOOL_CALLS]now{}[TOOL_CALLS]get_weather{"city": "x"}',
        [("now", {}), (W, {"city": "x"})],
    ),
    Case("mistral", "[TOOL_CALLS]now[CALL_ID]abc123XYZ[ARGS]{}", [("now", {})]),
    Case("mistral", "a [list] of [TOOLS]", content="a [list] of [TOOLS]"),
    Case("mistral", "[TOOL_CALLS]now and then", content="[TOOL_CALLS]now and then"),
]

LLAMA = [
    Case(
        "llama3_json",
        '{"name": "get_weather", "parameters": {"city": "A{"}}',
        [(W, {"city": "A{"})],
    ),
    Case(
        "llama3_json",
        '<|python_tag|>{"name": "now", "parameters": {}}; '
        '{"name": "write", "parameters": ' + HARD + "}",
        [("now", {}), ("write", HARD_VALUE)],
    ),
    Case("llama3_json", '{"type": "function", "name": "now", "parameters": {}}', [("now", {})]),
    Case("llama3_json", '{"type": "function", "function": "now", "parameters": {}}', [("now", {})]),
    Case(
        "llama3_json",
        'Sure:\n{"name": "now", "parameters": {}}\nthen\n',
        [("now", {})],
        "Sure:\nthen\n",
    ),
    Case(
        "llama3_json",
        'In line {"name": "now", "parameters": {}}',
        content='In line {"name": "now", "parameters": {}}',
    ),
    Case(
        "llama3_json",
        '{"name": "unknown", "parameters": {}}',
        content='{"name": "unknown", "parameters": {}}',
    ),
    Case("llama3_json", '{"a": 1}\n{"name": "now"}', [("now", {})], '{"a": 1}'),
    Case("llama3_json", "<|python_tag|>print(1)", content="<|python_tag|>print(1)"),
    Case(
        "llama3_json",
        '{"name": "now", "parameters": {}}\n\n{"name": "now", "parameters": {}}',
        [("now", {}), ("now", {})],
    ),
]

JSON = [
    Case("json", '{"name": "write", "arguments": ' + HARD + "}", [("write", HARD_VALUE)]),
    Case(
        "json",
        '[{"name": "now", "arguments": {}}, {"name": "get_weather", "arguments": {"city": "é"}}]',
        [("now", {}), (W, {"city": "é"})],
    ),
    Case(
        "json", 'I call\n```json\n{"name": "now", "arguments": {}}\n```\n', [("now", {})], "I call"
    ),
    Case("json", "```python\n[1, 2]\n```", content="```python\n[1, 2]\n```"),
    Case("json", "[1, 2]", content="[1, 2]"),
    Case("json", "[", content="["),
]
