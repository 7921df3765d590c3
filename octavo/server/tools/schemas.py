"""What a JSON schema says of the types of a value."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_MOST_STEPS = 64
_NAMES = {str: "string", bool: "boolean", int: "integer", float: "number", type(None): "null"}
_NAMES |= {dict: "object", list: "array"}


def types_of(schema: Any, root: Mapping[str, Any]) -> set[str]:
    """The types that ``schema`` allows, as far as it names them; empty where any will do.

    ``schema`` None means there is no schema for the value: a string. References are looked up in
    ``root``.
    """
    if schema is None:
        return {"string"}
    return _types(schema, root, [_MOST_STEPS])


def _types(schema: Any, root: Mapping[str, Any], steps: list[int]) -> set[str]:
    steps[0] -= 1
    if not isinstance(schema, Mapping) or steps[0] < 0:
        return set()
    if isinstance(reference := schema.get("$ref"), str):
        return _types(resolved(reference, root), root, steps)
    kind = schema.get("type")
    if isinstance(kind, str):
        return {kind}
    if isinstance(kind, list):
        return {name for name in kind if isinstance(name, str)}
    values = schema["enum"] if isinstance(schema.get("enum"), list) else []
    if "const" in schema:
        values = [schema["const"]]
    if values:
        return {_NAMES[type(value)] for value in values if type(value) in _NAMES}
    for union in ("anyOf", "oneOf"):
        if isinstance(parts := schema.get(union), list):
            found = [_types(part, root, steps) for part in parts]
            return set().union(*found) if all(found) else set()
    if isinstance(parts := schema.get("allOf"), list):
        found = [types for part in parts if (types := _types(part, root, steps))]
        return set.intersection(*found) if found else set()
    return {"object"} if "properties" in schema else set()


def resolved(reference: str, root: Mapping[str, Any]) -> Any:
    """What ``#/a/b`` names in ``root``; None when there is no such thing."""
    if not reference.startswith("#"):
        return None
    found: Any = root
    for part in reference[1:].split("/")[1:]:
        part = part.replace("~1", "/").replace("~0", "~")
        if not isinstance(found, Mapping) or part not in found:
            return None
        found = found[part]
    return found
