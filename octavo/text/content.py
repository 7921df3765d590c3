"""Message contents in the form a chat template reads: one string, or a list of typed parts."""

from __future__ import annotations

import json
from enum import Enum
from typing import Any

from jinja2 import nodes

from octavo.types import InvalidRequest

_TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}


class ContentFormat(Enum):
    STRING = "string"  # parts are joined with a newline
    OPENAI = "openai"  # a string becomes a list with one text part
    BOTH = "both"  # the template tells them apart itself


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


def normalise_messages(
    messages: list[dict[str, Any]], content_format: ContentFormat
) -> list[dict[str, Any]]:
    """Copies with contents in ``content_format`` (absent ones: "") and the arguments of tool calls
    as objects. Raises InvalidRequest naming the message and part."""
    return [_normalise(message, index, content_format) for index, message in enumerate(messages)]


def _normalise(message: dict[str, Any], index: int, wanted: ContentFormat) -> dict[str, Any]:
    where = f"messages[{index}]"
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise InvalidRequest(f"{where} needs a role", "messages")
    result = dict(message)
    content = message.get("content")
    if content is None:
        result["content"] = ""
    elif isinstance(content, str):
        if wanted is ContentFormat.OPENAI:
            result["content"] = [{"type": "text", "text": content}]
    elif isinstance(content, list):
        parts = [_part(part, f"{where}.content[{place}]") for place, part in enumerate(content)]
        if wanted is ContentFormat.STRING:
            result["content"] = "\n".join(part["text"] for part in parts)
        else:
            result["content"] = parts
    else:
        raise InvalidRequest(f"{where}.content must be a string or a list of parts", "messages")
    calls = message.get("tool_calls")
    if calls:
        result["tool_calls"] = [
            _call(call, f"{where}.tool_calls[{place}]") for place, call in enumerate(calls)
        ]
    elif "tool_calls" in result:
        del result["tool_calls"]
    return result


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


def _call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        raise InvalidRequest(f"{where}.function must be an object", "messages")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments) if arguments.strip() else {}
        except ValueError as error:
            raise InvalidRequest(
                f"{where}.function.arguments: not JSON ({error})", "messages"
            ) from None
    return {**call, "function": {**function, "arguments": arguments}}
