"""Answers in each format of calls, with what they say: as if by hand, from the families' templates.

Marks are written as text; a test turns those that its vocabulary has as tokens into tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field

STRING, OBJECT = {"type": "string"}, {"type": "object"}
TOOLS = {
    "get_weather": {
        "type": "object",
        "properties": {
            "city": STRING,
            "days": {"type": "integer"},
            "exact": {"type": "boolean"},
            "note": {"type": ["string", "null"]},
        },
        "required": ["city"],
    },
    "write": {
        "type": "object",
        "properties": {"path": STRING, "text": STRING, "meta": OBJECT, "tags": {"type": "array"}},
    },
    "now": {"type": "object", "properties": {}},
}


@dataclass
class Case:
    parser: str
    text: str
    calls: list[tuple[str, object]] = field(default_factory=list)
    content: str = ""
    reasoning: str = ""
    reasoning_parser: str | None = None
    inside: bool | None = None
    num_broken: int = 0  # calls that began and came to nothing


W = "get_weather"
HARD = r'{"path": "a\"}{[.txt", "text": "x{\"a\": [1, {\"b\": \"\u00e9\"}]}\n</tool_call> é😀 \\", '
HARD += r'"meta": {"k": [1.5e3, -0, true, null, {"": {}}]}, "tags": []}'
HARD_VALUE = {
    "path": 'a"}{[.txt',
    "text": 'x{"a": [1, {"b": "é"}]}\n</tool_call> é😀 \\',
    "meta": {"k": [1500.0, 0, True, None, {"": {}}]},
    "tags": [],
}


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

PYTHONIC = [
    Case(
        "pythonic",
        '[get_weather(city="Paris", days=3, exact=True, note=None)]',
        [(W, {"city": "Paris", "days": 3, "exact": True, "note": None})],
    ),
    Case("pythonic", "[now()]", [("now", {})]),
    Case(
        "pythonic",
        "[now(), get_weather(city='L\\'Aquila \\u00e9 \\x41\"\\n'),\n now( )]",
        [("now", {}), (W, {"city": "L'Aquila é A\"\n"}), ("now", {})],
    ),
    Case(
        "pythonic",
        "[write(path='''a'b\n''', meta={'k': [1, 2.5, (1, 'x'), {}], 3: -1e3}, "
        'tags=[], text="[now()]")]',
        [
            (
                "write",
                {
                    "path": "a'b\n",
                    "meta": {"k": [1, 2.5, [1, "x"], {}], "3": -1000.0},
                    "tags": [],
                    "text": "[now()]",
                },
            )
        ],
    ),
    Case("pythonic", "<|python_start|>[now()]<|python_end|>", [("now", {})]),
    Case(
        "pythonic",
        'Hm.\n[get_weather("Rome", days=0x10,)]\nOk',
        [(W, {"city": "Rome", "days": 16})],
        "Hm.\nOk",
    ),
    Case("pythonic", "[1, 2, 3]", content="[1, 2, 3]"),
    Case("pythonic", "[unknown()]", content="[unknown()]"),
    Case(
        "pythonic", "[get_weather(city=1+1)] x", content="[get_weather(city=1+1)] x", num_broken=1
    ),
    Case(
        "pythonic",
        "[now(), get_weather(city=open('x'))]",
        [("now", {})],
        "get_weather(city=open('x'))]",
        num_broken=1,
    ),
    Case("pythonic", "[write(text='never", content="[write(text='never", num_broken=1),
]


def coder(name: str, **values: str) -> str:
    lines = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    return f"<tool_call>\n<function={name}>\n{lines}</function>\n</tool_call>"


QWEN_CODER = [
    Case(
        "qwen3_coder",
        coder(W, city="Paris", days="3", exact="True", note="null"),
        [(W, {"city": "Paris", "days": 3, "exact": True, "note": None})],
    ),
    Case(
        "qwen3_coder",
        "Ok.\n" + coder("now") + "\n" + coder(W, city="12", note="12"),
        [("now", {}), (W, {"city": "12", "note": "12"})],
        "Ok.",
    ),
    Case(
        "qwen3_coder",
        coder(
            "write",
            text='def f():\n    return "<a>" </parameter> \\ é\n\n<parameter=x',
            path="",
            meta='{"a": [1, {"b": null}]}',
            tags="['x', 1]",
        ),
        [
            (
                "write",
                {
                    "text": 'def f():\n    return "<a>" </parameter> \\ é\n\n<parameter=x',
                    "path": "",
                    "meta": {"a": [1, {"b": None}]},
                    "tags": ["x", 1],
                },
            )
        ],
    ),
    Case("qwen3_coder", "<function=now></function>", [("now", {})]),
    Case(
        "qwen3_coder",
        "<tool_call><function=get_weather><parameter=city>A</parameter></function>"
        "<function=now></function></tool_call> x",
        [(W, {"city": "A"}), ("now", {})],
        " x",
    ),
    Case(
        "qwen3_coder",
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nA",
        content="<tool_call>\n<function=get_weather>\n<parameter=city>\nA",
        num_broken=1,
    ),
    Case("qwen3_coder", "<function=nothing></function>", content="<function=nothing></function>"),
    Case("qwen3_coder", coder("unknown", a="1"), [("unknown", {"a": "1"})]),
    Case("qwen3_coder", "x\n</think>\n" + coder("now"), [("now", {})], "", "x", "qwen3", True),
]


def deepseek(*calls: tuple[str, str], old: bool = True) -> str:
    texts = [
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{arguments}\n```<｜tool▁call▁end｜>"
        if old
        else f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{arguments}<｜tool▁call▁end｜>"
        for name, arguments in calls
    ]
    between = "\n" if old else ""
    return "<｜tool▁calls▁begin｜>" + between.join(texts) + "<｜tool▁calls▁end｜>"


DEEPSEEK = [
    Case("deepseek_v3", deepseek((W, '{"city": "Paris"}')), [(W, {"city": "Paris"})]),
    Case(
        "deepseek_v3",
        "Hm.\n" + deepseek(("now", "{}"), ("write", HARD)),
        [("now", {}), ("write", HARD_VALUE)],
        "Hm.",
    ),
    Case(
        "deepseek_v3",
        deepseek(("now", "{}"), ("write", HARD), ("now", "{}"), old=False),
        [("now", {}), ("write", HARD_VALUE), ("now", {})],
    ),
    Case(
        "deepseek_v3",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>now<｜tool▁call▁end｜>",
        content="<｜tool▁call▁begin｜>now<｜tool▁call▁end｜>",
    ),
    Case(
        "deepseek_v3",
        "th\n</think>\n\n" + deepseek(("now", "{}")),
        [("now", {})],
        "",
        "th",
        "deepseek_r1",
    ),
]

HARMONY_CALL = "<|channel|>commentary to=functions.{} <|constrain|>json<|message|>{}<|call|>"
HARMONY = [
    Case("openai", "<|channel|>final<|message|>Hello <b>.<|return|>", content="Hello <b>."),
    Case(
        "openai",
        "<|channel|>analysis<|message|>Think.<|end|><|start|>assistant<|channel|>final"
        "<|message|>Hi",
        content="Hi",
        reasoning="Think.",
    ),
    Case(
        "openai",
        "<|channel|>analysis<|message|>A<|end|><|start|>assistant"
        + HARMONY_CALL.format("write", HARD),
        [("write", HARD_VALUE)],
        "",
        "A",
    ),
    Case(
        "openai",
        "<|channel|>analysis<|message|>A<|end|><|start|>assistant<|channel|>commentary"
        "<|message|>I look.<|end|><|start|>assistant"
        + HARMONY_CALL.format(W, '{"city": "é"}')
        + "<|start|>assistant to=functions.now<|channel|>commentary json<|message|>{}<|call|>",
        [(W, {"city": "é"}), ("now", {})],
        "I look.",
        "A",
    ),
    Case(
        "openai",
        "<|channel|>analysis<|message|>A<|end|><|start|>assistant<|channel|>analysis "
        "to=python code<|message|>1+1<|call|>",
        reasoning="A\n1+1",
    ),
    Case("openai", "plain", content="plain"),
    Case("openai", "<|channel|>analysis<|message|>cut", reasoning="cut"),
]

CASES = [
    *(HERMES + GRANITE + MISTRAL + LLAMA + JSON),
    *(PYTHONIC + QWEN_CODER + DEEPSEEK + HARMONY),
]
