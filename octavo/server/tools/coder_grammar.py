"""A function's parameters as a grammar of ``qwen3_coder``'s blocks, whose values are texts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from octavo.server.tools.lark import Lark, members_of, refusal
from octavo.server.tools.schemas import resolved, types_of

_FORMAT = "parameters written as text (--tool-call-parser qwen3_coder)"
_OF_TEXT = ("pattern", "minLength", "maxLength", "format")
_END = "\n</parameter>\n"


def coder_parameters(lark: Lark, schema: Mapping[str, Any], strict: bool) -> str:
    """An expression for the blocks of all parameters, in the schema's order. Raises InvalidRequest
    for keywords that cannot be enforced on values written as text; those for strings are ignored
    where the function is not ``strict``."""
    properties, required = members_of(schema, _FORMAT)
    return " ".join(
        _parameter(lark, name, value, schema, strict) + ("" if name in required else "?")
        for name, value in properties.items()
    )


def _parameter(lark: Lark, name: str, schema: Any, root: Mapping[str, Any], strict: bool) -> str:
    begin = lark.literal(f"<parameter={name}>\n")
    found = _found(schema, root)
    values = found.get("enum", [found["const"]] if "const" in found else None)
    if values:
        texts = lark.one_of([_written(lark, value) for value in values])
        return lark.rule(f"{begin} {texts} {lark.literal(_END)}")
    types = types_of(found, root)
    if types and "string" not in types:
        definitions = {key: root[key] for key in ("$defs", "definitions") if key in root}
        value = lark.json({**found, **definitions})
        return lark.rule(f"{begin} {value} {lark.literal(_END)}")
    if strict and (beyond := [word for word in _OF_TEXT if word in found]):
        raise refusal(repr(beyond[0]), _FORMAT)
    text = lark.rule("/(?s:.*)/", f"[suffix={lark.literal(_END)}]")
    return lark.rule(f"{begin} {text}")


def _found(schema: Any, root: Mapping[str, Any]) -> Mapping[str, Any]:
    """The schema, or what it refers to."""
    for _ in range(8):
        if not isinstance(schema, Mapping):
            break
        if "$ref" not in schema:
            return schema
        schema = resolved(schema["$ref"], root)
    if schema is True:
        return {}
    raise refusal("a schema that allows nothing, or a reference that leads nowhere", _FORMAT)


def _written(lark: Lark, value: Any) -> str:
    """An enumerated value: a string as it is, others as JSON."""
    if isinstance(value, str):
        return lark.literal(value) or '""'
    return lark.json({"const": value})
