"""Pieces of llguidance's Lark dialect, for a vocabulary in which marks are tokens or are not."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from octavo.grammar.keywords import ENFORCED, LISTS, MAPS, SINGLE
from octavo.grammar.regexes import literal
from octavo.server.tools.marks import Marks
from octavo.types import InvalidRequest

_COMPOSED = {"anyOf", "oneOf", "allOf", "$ref"}
# Of strings; llguidance refuses others.
FORMATS = {"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid"}


class Lark:
    """A grammar in the making. Expressions are texts; rules get names of their own."""

    def __init__(self, marks: Marks) -> None:
        self.marks = marks
        self._rules: list[str] = []

    def text(self, start: str) -> str:
        """The whole grammar, with its first rule."""
        return "\n".join([f"start: {start}", *self._rules]) + "\n"

    def rule(self, expression: str, attributes: str = "") -> str:
        """The name of a new rule."""
        name = f"r{len(self._rules)}"
        self._rules.append(f"{name}{attributes}: {expression}")
        return name

    def reserve(self) -> str:
        """The name of a rule that ``define`` gives a body, so that it can refer to itself."""
        self._rules.append("")
        return f"r{len(self._rules) - 1}"

    def define(self, name: str, expression: str) -> None:
        self._rules[int(name[1:])] = f"{name}: {expression}"

    def terminal(self, regex: str) -> str:
        """The name of a new terminal, for a regex between slashes."""
        name = f"T{len(self._rules)}"
        self._rules.append(f"{name}: {regex}")
        return name

    def literal(self, text: str) -> str:
        """Just this text; nothing for an empty one."""
        return json.dumps(text, ensure_ascii=False) if text else ""

    def mark(self, text: str) -> str:
        """A mark: its token where the vocabulary has one, so that nothing else spells it."""
        index = self.marks.ids.get(text)
        return self.literal(text) if index is None else f"<[{index}]>"

    def json(self, schema: Any) -> str:
        """Any value that the schema allows."""
        return self.rule(f"%json {json.dumps(schema, ensure_ascii=False)}")

    def any_text(self) -> str:
        """Text, of which a mark that is a token is no part."""
        return self.terminal("/(?s:.*)/")

    def text_before(self, mark: str) -> str:
        """Any text up to the mark, and the mark."""
        if self.marks.is_token(mark):
            return self.rule(f"{self.any_text()} {self.mark(mark)}")
        return self.rule("/(?s:.*)/", f"[suffix={self.literal(mark)}]")

    def text_without(self, *marks: str) -> str:
        """Any text in which the marks are not."""
        if not marks:
            return self.any_text()
        return self.excluding(f"(?s:.*)({'|'.join(map(literal, marks))})(?s:.*)")

    def excluding(self, regex: str) -> str:
        """Any text that the regex does not match. (A complement alone has special tokens in it.)"""
        return self.terminal(f"/(?s:.*)/ & ~/{regex}/")

    def one_of(self, expressions: Sequence[str]) -> str:
        return self.rule("\n  | ".join(expressions))

    def listed(self, item: str, separator: str, several: bool) -> str:
        """One item, or ``several`` with a separator between them."""
        if not several:
            return item
        return self.rule(f"{item} ({self.literal(separator)} {item})*")


def closed(schema: Mapping[str, Any], strict: bool = True) -> dict[str, Any]:
    """A function's parameters as what its arguments may be: an object, and nothing in it that the
    schema does not name unless the schema says that there may be. Not ``strict``: less what
    cannot be enforced."""
    whole = {"type": "object", **(schema if strict else enforceable(schema))}
    if not _COMPOSED & set(whole):
        whole.setdefault("properties", {})
        if "patternProperties" not in whole:
            whole.setdefault("additionalProperties", False)
    return whole


def members_of(schema: Mapping[str, Any], written: str) -> tuple[dict[str, Any], set[str]]:
    """The properties of a function's arguments, and which are required, for formats that write
    them one by one. Raises InvalidRequest where they cannot be told; ``written``: how the format
    writes calls."""
    if composed := _COMPOSED & set(schema):
        raise refusal(f"{min(composed)!r} for all parameters", written)
    properties, required = schema["properties"], set(schema.get("required", ()))
    if unnamed := required - set(properties):
        raise refusal(f"a required parameter {min(unnamed)!r} without a schema", written)
    return properties, required


def refusal(what: str, written: str) -> InvalidRequest:
    return InvalidRequest(f"a schema of tools has {what}, which cannot be enforced in {written}",
                          "tools")  # fmt: skip


def enforceable(schema: Any) -> Any:
    """A schema less the keywords that no grammar enforces."""
    if not isinstance(schema, Mapping):
        return schema
    kept: dict[str, Any] = {}
    for word, value in schema.items():
        if word not in ENFORCED or (word == "format" and value not in FORMATS):
            continue
        if word in MAPS and isinstance(value, Mapping):
            value = {name: enforceable(part) for name, part in value.items()}
        elif word in LISTS and isinstance(value, list):
            value = [enforceable(part) for part in value]
        elif word in SINGLE:
            value = enforceable(value)
        kept[word] = value
    return kept
