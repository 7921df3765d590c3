"""What a request says of tools, checked before anything runs."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NoReturn

from octavo.server.protocol import ChatRequest, Message
from octavo.types import InvalidRequest

MOST_TOOLS = 1024
_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,128}", re.ASCII)


@dataclass(frozen=True)
class Function:
    name: str
    description: str
    parameters: Mapping[str, Any]
    strict: bool


@dataclass(frozen=True)
class ToolUse:
    """``functions``: what the answer may call; with a named choice only that one."""

    functions: tuple[Function, ...] = ()
    choice: Literal["none", "auto", "required", "named"] = "none"
    parallel: bool = True

    @property
    def calls(self) -> bool:
        """Whether calls are to be read from the answer."""
        return self.choice != "none"

    @property
    def forced(self) -> bool:
        return self.choice in ("required", "named")


def tool_use(body: ChatRequest) -> ToolUse:
    """The tools and the choice among them. Raises InvalidRequest naming the field."""
    tools = body.tools or []
    if len(tools) > MOST_TOOLS:
        _refuse(f"tools holds {len(tools)} functions; at most {MOST_TOOLS} are taken")
    functions = [_function(tool, f"tools[{i}]") for i, tool in enumerate(tools)]
    names = [function.name for function in functions]
    if len(set(names)) < len(names):
        name = next(name for name in names if names.count(name) > 1)
        _refuse(f"two of tools have the function name {name!r}")
    check_messages(body.messages)
    parallel = body.parallel_tool_calls is not False
    choice = body.tool_choice
    if choice in (None, "none"):
        kind: Any = "auto" if choice is None and functions else "none"
        return ToolUse(tuple(functions), kind, parallel)
    if not functions:
        raise InvalidRequest("tool_choice needs tools", "tool_choice")
    if choice in ("auto", "required"):
        return ToolUse(tuple(functions), choice, parallel)  # type: ignore[arg-type]
    name = _chosen(choice)
    chosen = tuple(function for function in functions if function.name == name)
    if not chosen:
        raise InvalidRequest(
            f"tool_choice names the function {name!r}; tools has {', '.join(map(repr, names))}",
            "tool_choice",
        )
    return ToolUse(chosen, "named", False)


def _chosen(choice: Any) -> str:
    function = choice.get("function") if isinstance(choice, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str) or choice.get("type", "function") != "function":
        raise InvalidRequest(
            "tool_choice must be 'none', 'auto', 'required' or "
            '{"type": "function", "function": {"name": NAME}}',
            "tool_choice",
        )
    return name


def _function(tool: Any, where: str) -> Function:
    if tool.get("type", "function") != "function":
        _refuse(f"{where}.type is {tool['type']!r}; only 'function' is served")
    function = tool.get("function")
    if not isinstance(function, dict):
        _refuse(f"{where}.function must be an object with a name")
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        _refuse(
            f"{where}.function.name is {name!r}; it must be 1 to 128 letters, digits, '_', '-', '.'"
        )
    description = function.get("description")
    if description is not None and not isinstance(description, str):
        _refuse(f"{where}.function.description must be a string")
    strict = function.get("strict")
    if strict not in (None, True, False):
        _refuse(f"{where}.function.strict must be true or false")
    schema = function.get("parameters")
    _check_schema({} if schema is None else schema, f"{where}.function.parameters")
    return Function(name, description or "", schema or {}, bool(strict))


def _check_schema(schema: Any, where: str) -> None:
    """What every parser relies on; a grammar checks the rest when it is made of the schema."""
    if not isinstance(schema, dict):
        _refuse(f"{where} must be a JSON schema, an object")
    if schema.get("type", "object") != "object":
        _refuse(f"{where}.type is {schema['type']!r}; arguments are an object")
    properties = schema.get("properties", {})
    if not isinstance(properties, dict):
        _refuse(f"{where}.properties must be an object")
    for name, value in properties.items():
        if not isinstance(value, (dict, bool)):
            _refuse(f"{where}.properties.{name} must be a JSON schema, an object")
    required = schema.get("required", [])
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        _refuse(f"{where}.required must be a list of names")


def _refuse(message: str) -> NoReturn:
    raise InvalidRequest(message, "tools")


def check_messages(messages: Sequence[Message]) -> None:
    """Answers of tools follow calls, and name one where they name any."""
    known: set[str] = set()
    num_calls = 0
    for place, message in enumerate(messages):
        where = f"messages[{place}]"
        if message.tool_calls:
            if message.role != "assistant":
                raise InvalidRequest(f"{where}: only an assistant has tool_calls", "messages")
            known.update(call.id for call in message.tool_calls if call.id is not None)
            num_calls += len(message.tool_calls)
        if message.role != "tool":
            continue
        if not num_calls:
            raise InvalidRequest(f"{where}: no tool was called before this answer", "messages")
        if message.tool_call_id is not None and known and message.tool_call_id not in known:
            raise InvalidRequest(
                f"{where}.tool_call_id is {message.tool_call_id!r}; no call before has that id",
                "messages",
            )
