"""A JSON schema as a grammar of Python literals, for calls written in Python."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from octavo.server.tools.lark import Lark, members_of, refusal
from octavo.server.tools.schemas import resolved
from octavo.types import InvalidRequest

_FORMAT = "calls written in Python (--tool-call-parser pythonic)"
_STRING = r'/"([^"\\\n\x{00}-\x{1f}]|\\["\\nrt])*"/'
_INTEGER = r"/-?(0|[1-9][0-9]{0,17})/"
_NUMBER = r"/-?(0|[1-9][0-9]{0,17})(\.[0-9]{1,17})?([eE][-+]?[0-9]{1,2})?/"
_SCALARS = {"string": _STRING, "integer": _INTEGER, "number": _NUMBER}
_SCALARS |= {"boolean": '"True" | "False"', "null": '"None"'}
# What is enforced here, or says nothing of the values. With any other keyword a schema is refused.
_KNOWN = {
    *("type", "enum", "const", "anyOf", "oneOf", "$ref", "$defs", "definitions"),
    *("properties", "required", "additionalProperties", "items"),
    *("title", "description", "default", "examples", "example", "$schema", "$id", "$comment"),
}


def python_arguments(lark: Lark, schema: Mapping[str, Any]) -> str:
    """An expression for ``a=1, b="x"``: what stands between a call's parentheses."""
    members_of(schema, _FORMAT)
    _check(schema)
    return _Writer(lark, schema).members(schema, lambda name: f"{name}=")


class _Writer:
    def __init__(self, lark: Lark, root: Mapping[str, Any]) -> None:
        self.lark = lark
        self.root = root
        self._named: dict[str, str] = {}

    def members(self, schema: Mapping[str, Any], spelled: Any) -> str:
        """The members of an object, required ones first, with commas between them."""
        properties = schema.get("properties", {})
        required = [name for name in properties if name in schema.get("required", ())]
        optional = [name for name in properties if name not in required]
        parts = {
            name: self.lark.rule(f"{self.lark.literal(spelled(name))} {self.value(value)}")
            for name, value in properties.items()
        }
        tails = [f'(", " {parts[name]})?' for name in optional]
        if required:
            return " ".join([' ", " '.join(parts[name] for name in required), *tails])
        firsts = [" ".join([parts[name], *tails[i + 1 :]]) for i, name in enumerate(optional)]
        return f"({self.lark.one_of(firsts)})?" if firsts else '""'

    def value(self, schema: Any) -> str:
        if schema is True or schema == {}:
            return self.anything()
        _check(schema)
        if "$ref" in schema:
            return self.reference(schema["$ref"])
        if "const" in schema or "enum" in schema:
            values = schema["enum"] if "enum" in schema else [schema["const"]]
            return self.lark.one_of([self.lark.literal(repr(value)) for value in values])
        for union in ("anyOf", "oneOf"):
            if union in schema:
                return self.lark.one_of([self.value(part) for part in schema[union]])
        kind = schema.get("type", "object" if "properties" in schema else None)
        if kind is None:
            return self.anything()
        kinds = kind if isinstance(kind, list) else [kind]
        return self.lark.one_of([self.typed(name, schema) for name in kinds])

    def typed(self, kind: str, schema: Mapping[str, Any]) -> str:
        if kind in _SCALARS:
            return self.lark.rule(_SCALARS[kind])
        if kind == "array":
            return self.sequence("[", self.value(schema.get("items", {})), "]")
        if kind != "object":
            raise _refusal(f"the type {kind!r}")
        if "properties" not in schema:
            extra = schema.get("additionalProperties", True)
            value = self.anything() if extra is True else self.value(extra)
            return self.sequence("{", f'{_STRING} ": " {value}', "}")
        return self.lark.rule(f'"{{" {self.members(schema, lambda name: f"{name!r}: ")} "}}"')

    def sequence(self, opener: str, item: str, closer: str) -> str:
        return self.lark.rule(f'"{opener}" ({item} (", " {item})*)? "{closer}"')

    def reference(self, target: str) -> str:
        """A rule that may refer to itself, so its name is there before its body."""
        if target not in self._named:
            found = resolved(target, self.root)
            if found is None:
                raise _refusal(f"the reference {target!r}")
            self._named[target] = name = self.lark.reserve()
            self.lark.define(name, self.value(found))
        return self._named[target]

    def anything(self) -> str:
        if "" not in self._named:
            self._named[""] = name = self.lark.reserve()
            scalars: Sequence[str] = [self.lark.rule(text) for text in _SCALARS.values()]
            lists = self.sequence("[", name, "]")
            maps = self.sequence("{", f'{_STRING} ": " {name}', "}")
            self.lark.define(name, self.lark.one_of([*scalars, lists, maps]))
        return self._named[""]


def _check(schema: Any) -> None:
    if not isinstance(schema, Mapping):
        raise _refusal("a schema that allows nothing")
    for word in schema:
        if word not in _KNOWN:
            raise _refusal(f"{word!r}")


def _refusal(what: str) -> InvalidRequest:
    return refusal(what, _FORMAT)
