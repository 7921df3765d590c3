"""Tools for models whose chat template knows none: described in the system message, calls and their
results written as text."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

_INTRODUCTION = """\
You can call functions. To call one, write this on a line of its own and nothing after it:
{example}
The functions, with the JSON schemas of their parameters:
"""


def described(
    messages: list[dict[str, Any]], tools: Sequence[Any], example: str
) -> list[dict[str, Any]]:
    """``messages`` with the tools in the system message, after what it said. ``example``: how a
    call is written."""
    lines = [
        json.dumps(tool.get("function", tool) if isinstance(tool, dict) else tool,
                   ensure_ascii=False)
        for tool in tools
    ]  # fmt: skip
    text = _INTRODUCTION.replace("{example}", example) + "\n".join(lines)
    first = messages[0]
    if first["role"] not in ("system", "developer"):
        return [{"role": "system", "content": text}, *messages]
    said = first.get("content") or ""
    content: Any = f"{said}\n\n{text}" if said else text
    if isinstance(said, list):
        content = [*said, {"type": "text", "text": text}]
    return [{**first, "content": content}, *messages[1:]]


def as_text(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Calls as what an assistant said, their results as what a user said."""
    return [_as_text(message) for message in messages]


def _as_text(message: dict[str, Any]) -> dict[str, Any]:
    if message["role"] == "tool":
        of = message.get("name") or message.get("tool_call_id") or "the function"
        content = message.get("content") or ""
        if isinstance(content, list):
            content = "\n".join(part["text"] for part in content)
        return {"role": "user", "content": f"The result of {of}:\n{content}"}
    calls = message.get("tool_calls")
    if not calls:
        return message
    lines = [
        f'{{"name": {json.dumps(call["function"]["name"], ensure_ascii=False)}, '
        f'"arguments": {call["function"]["arguments"] or "{}"}}}'
        for call in calls
    ]
    rest = {name: value for name, value in message.items() if name != "tool_calls"}
    said = message.get("content") or ""
    if isinstance(said, list):
        return {**rest, "content": [*said, {"type": "text", "text": "\n".join(lines)}]}
    return {**rest, "content": "\n".join([said, *lines] if said else lines)}
