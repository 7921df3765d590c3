"""Messages in the form a chat template reads: a content as one string or as a list of typed parts,
the arguments of tool calls as objects or as text."""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import Enum
from typing import Any

from jinja2 import nodes

from octavo.types import InvalidRequest

_TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
# Names under which clients send back what a model thought; templates read the first (gpt-oss the
# second).
_REASONING = ("reasoning_content", "thinking", "reasoning")


class ContentFormat(Enum):
    STRING = "string"  # parts are joined with a newline
    OPENAI = "openai"  # a string becomes a list with one text part
    BOTH = "both"  # the template tells them apart itself


@dataclass(frozen=True)
class MessageForm:
    """What one template wants messages to look like."""

    content: ContentFormat
    null_beside_calls: bool = False  # it tells a message of tool calls by its content being null
    calls_as_text: bool = False  # it writes the arguments of calls as they are: JSON text


def asks_for_null(tree: nodes.Template) -> bool:
    """Whether the template compares a content with null, as DeepSeek's do."""
    tests = (test for test in tree.find_all(nodes.Test) if test.name == "none")
    if any(_is_content(test.node, {"content"}) for test in tests):
        return True
    return any(
        _is_content(compare.expr, {"content"})
        and any(isinstance(o.expr, nodes.Const) and o.expr.value is None for o in compare.ops)
        for compare in tree.find_all(nodes.Compare)
    )


def detect_content_format(tree: nodes.Template) -> ContentFormat:
    """OPENAI when the template loops over a content; BOTH when it also asks if it is a string."""
    names = {"content"}
    for assignment in tree.find_all(nodes.Assign):
        if _is_content(assignment.node, {"content"}) and isinstance(assignment.target, nodes.Name):
            names.add(assignment.target.name)
    if not any(_is_content(loop.iter, names) for loop in tree.find_all(nodes.For)):
        return ContentFormat.STRING
    tests = (test for test in tree.find_all(nodes.Test) if test.name == "string")
    asks = any(_is_content(test.node, names) for test in tests)
    return ContentFormat.BOTH if asks else ContentFormat.OPENAI


def _is_content(node: nodes.Node, names: set[str]) -> bool:
    """Whether the expression is ``message.content``, ``message['content']`` or a name for it."""
    if isinstance(node, nodes.Getattr):
        return node.attr == "content"
    if isinstance(node, nodes.Getitem):
        return isinstance(node.arg, nodes.Const) and node.arg.value == "content"
    if isinstance(node, nodes.Filter) and node.node is not None:
        return _is_content(node.node, names)
    return isinstance(node, nodes.Name) and node.name in names


def normalise_messages(messages: list[dict[str, Any]], form: MessageForm) -> list[dict[str, Any]]:
    """Copies in ``form``: contents that are absent are "" (null beside tool calls where the
    template asks for that), and what a model thought has the names templates read.
    Raises InvalidRequest naming the message and part."""
    return [_normalise(message, index, form) for index, message in enumerate(messages)]


def _normalise(message: dict[str, Any], index: int, form: MessageForm) -> dict[str, Any]:
    where = f"messages[{index}]"
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise InvalidRequest(f"{where} needs a role", "messages")
    result = dict(message)
    calls = result.pop("tool_calls", None)
    if calls:
        result["tool_calls"] = [
            _call(call, f"{where}.tool_calls[{place}]", form.calls_as_text)
            for place, call in enumerate(calls)
        ]
    result["content"] = _content(message.get("content"), where, form.content)
    if calls and form.null_beside_calls and not message.get("content"):
        result["content"] = None
    thought = next((message[name] for name in _REASONING if message.get(name) is not None), None)
    if thought is not None:
        result = {"thinking": thought, **result, "reasoning_content": thought}
    return result


def _content(content: Any, where: str, wanted: ContentFormat) -> str | list[dict[str, Any]]:
    if content is None:
        return ""
    if isinstance(content, str):
        return [{"type": "text", "text": content}] if wanted is ContentFormat.OPENAI else content
    if not isinstance(content, list):
        raise InvalidRequest(f"{where}.content must be a string or a list of parts", "messages")
    parts = [_part(part, f"{where}.content[{place}]") for place, part in enumerate(content)]
    if wanted is ContentFormat.STRING:
        return "\n".join(part["text"] for part in parts)
    return parts


def _part(part: Any, where: str) -> dict[str, Any]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    kind = part.get("type") if isinstance(part, dict) else None
    if kind not in _TEXT_PARTS:
        raise InvalidRequest(f"{where}.type is {kind!r}; only text is supported", "messages")
    text = part.get(_TEXT_PARTS[kind])
    if not isinstance(text, str):
        raise InvalidRequest(f"{where}.{_TEXT_PARTS[kind]} must be a string", "messages")
    return {"type": "text", "text": text}


def _call(call: Any, where: str, as_text: bool) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        raise InvalidRequest(f"{where}.function must be an object", "messages")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            read = json.loads(arguments) if arguments.strip() else {}
        except ValueError as error:
            raise InvalidRequest(
                f"{where}.function.arguments: not JSON ({error})", "messages"
            ) from None
        arguments = (arguments if arguments.strip() else "{}") if as_text else read
    elif as_text:
        arguments = json.dumps({} if arguments is None else arguments, ensure_ascii=False)
    return {**call, "function": {**function, "arguments": arguments}}
