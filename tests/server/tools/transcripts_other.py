"""Answers whose calls are Python, blocks of text, or JSON between tokens."""

from __future__ import annotations

from tests.server.tools.case import HARD, HARD_VALUE, Case, W

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
