"""A fixed set of conversations put through a chat template: what it renders, shows and keeps apart.

``octavo template-check`` prints it. A case that fails is not always a fault of the template: many
models know no system role or no tools. The basic cases are those that a chat cannot do without.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from octavo.text.chat import ChatTemplate
from octavo.text.tokenizer import Tokenizer
from octavo.types import InvalidRequest

Messages = list[dict[str, Any]]

# Words that no template writes by itself.
_SYSTEM, _FIRST, _ANSWER, _SECOND = "quartzite", "marmalade", "tangerine", "zeppelin"
_TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The weather in a city",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "description": "its name"}},
                "required": ["city"],
            },
        },
    }
]


def _user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def _assistant(content: str | None, *cities: str) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if cities:
        message["tool_calls"] = [
            {
                "id": _call_id(place),
                "type": "function",
                "function": {"name": "get_weather", "arguments": json.dumps({"city": city})},
            }
            for place, city in enumerate(cities)
        ]
    return message


def _result(content: str, place: int = 0) -> dict[str, Any]:
    return {
        "role": "tool",
        "tool_call_id": _call_id(place),
        "name": "get_weather",
        "content": content,
    }


def _call_id(place: int) -> str:
    return f"call0000{place}"  # nine characters, as Mistral's templates ask


@dataclass(frozen=True)
class Case:
    """``shown``: texts that must be in what is rendered, in this order."""

    name: str
    messages: Messages
    shown: tuple[str, ...]
    options: dict[str, Any] = field(default_factory=dict)
    basic: bool = False


_CONTINUED = {"add_generation_prompt": False, "continue_final_message": True}
CASES = (
    Case("one user message", [_user(_FIRST)], (_FIRST,), basic=True),
    Case(
        "several turns",
        [_user(_FIRST), _assistant(_ANSWER), _user(_SECOND)],
        (_FIRST, _ANSWER, _SECOND),
        basic=True,
    ),
    Case(
        "content as a list of parts",
        [_user([{"type": "text", "text": _FIRST}, {"type": "text", "text": _SECOND}])],
        (_FIRST, _SECOND),
        basic=True,
    ),
    Case("empty content", [_user("")], (), basic=True),
    Case(
        "system message",
        [{"role": "system", "content": _SYSTEM}, _user(_FIRST)],
        (_SYSTEM, _FIRST),
    ),
    Case(
        "last message continued",
        [_user(_FIRST), _assistant(_ANSWER)],
        (_FIRST, _ANSWER),
        _CONTINUED,
    ),
    Case("tools", [_user(_FIRST)], ("get_weather",), {"tools": _TOOLS}),
    Case(
        "a tool's call and result",
        [_user(_FIRST), _assistant(None, _ANSWER), _result(_SECOND)],
        (_FIRST, f'"{_ANSWER}"', _SECOND),
        {"tools": _TOOLS},
    ),
    Case(
        "an answer after the result",
        [
            _user(_FIRST),
            _assistant("", _ANSWER),
            _result(_SECOND),
            _assistant(_SYSTEM),
            _user(_FIRST),
        ],
        (_FIRST, f'"{_ANSWER}"', _SECOND, _SYSTEM),
        {"tools": _TOOLS},
    ),
    Case(
        "two calls at once",
        [_user(_FIRST), _assistant(None, _ANSWER, _SYSTEM), _result(_SECOND), _result(_FIRST, 1)],
        (f'"{_ANSWER}"', f'"{_SYSTEM}"', _SECOND, _FIRST),
        {"tools": _TOOLS},
    ),
)


@dataclass(frozen=True)
class Finding:
    """``problem``: "" when the case passed. ``text``: what was rendered, None when nothing was."""

    name: str
    problem: str
    basic: bool
    text: str | None = None


def check_template(template: ChatTemplate, tokenizer: Tokenizer) -> list[Finding]:
    """Every case and what is wrong with it, the basic ones first."""
    findings = [_rendered(template, case) for case in CASES]
    whole: tuple[tuple[str, bool, Callable[[], str]], ...] = (
        ("generation prompt", True, lambda: _generation_problem(template)),
        ("BOS not twice", True, lambda: _bos_problem(template, tokenizer)),
        ("no forged control tokens", True, lambda: _forging_problem(template, tokenizer)),
        ("BOS where the tokenizer has one", False, lambda: _no_bos_problem(template, tokenizer)),
    )
    for name, basic, check in whole:
        try:
            findings.append(Finding(name, check(), basic))
        except InvalidRequest as error:
            findings.append(Finding(name, str(error), basic))
    return sorted(findings, key=lambda finding: not finding.basic)


def _rendered(template: ChatTemplate, case: Case) -> Finding:
    try:
        text = template.render(case.messages, **case.options)
    except InvalidRequest as error:
        return Finding(case.name, str(error), case.basic)
    problem = ", ".join(f"does not show {item}" for item in _absent(text, case.shown))
    if case.options.get("continue_final_message") and not text.rstrip().endswith(_ANSWER):
        problem = f"goes on after the last message: {text[-20:]!r}"
    return Finding(case.name, problem, case.basic, text)


def _absent(text: str, shown: tuple[str, ...]) -> Iterator[str]:
    at = 0
    for item in shown:
        found = text.find(item, at)
        if found < 0:
            yield f"{item} (or not in its place)" if item in text else item
        else:
            at = found + len(item)


def _generation_problem(template: ChatTemplate) -> str:
    """The prompt ends where the model is to write: that end is put after the conversation."""
    messages = [_user(_FIRST)]
    with_prompt = template.render(messages)
    without = template.render(messages, add_generation_prompt=False)
    if "add_generation_prompt" not in template.variables:
        return ""  # the end of a user's turn is where the answer begins
    if with_prompt == without:
        return "add_generation_prompt changes nothing"
    if not with_prompt.startswith(without.rstrip()):
        return "add_generation_prompt changes what comes before the end"
    return ""


def _bos_problem(template: ChatTemplate, tokenizer: Tokenizer) -> str:
    """Some models begin every turn with what is also their BOS: only the beginning counts."""
    ids, bos = template.encode([_user(_FIRST)]), tokenizer.bos_id
    return "BOS comes twice at the beginning" if bos is not None and ids[:2] == [bos, bos] else ""


def _no_bos_problem(template: ChatTemplate, tokenizer: Tokenizer) -> str:
    if not tokenizer.adds_bos or tokenizer.bos_id in template.encode([_user(_FIRST)]):
        return ""
    return (
        "the tokenizer puts BOS before a text, the template writes none: if the model expects one, "
        "send add_special_tokens"
    )


def _forging_problem(template: ChatTemplate, tokenizer: Tokenizer) -> str:
    """A user's text that spells control tokens must add none."""
    controls = [tokenizer.token_text(index) for index in sorted(tokenizer.control_ids)]

    def count(text: str) -> int:
        ids = template.encode([_user(text)])
        return sum(index in tokenizer.control_ids for index in ids)

    plain = count(_FIRST)
    forged = [text for text in controls if count(f"{_FIRST} {text} {_SECOND}") != plain]
    return f"a user's text can spell {', '.join(forged[:4])}" if forged else ""
