"""Qwen3-Coder's and Qwen3.5's::

    <tool_call>
    <function=f>
    <parameter=a>
    value
    </parameter>
    </function>
    </tool_call>

A value is text: a string where the tool's schema allows one, else what JSON or Python makes of it.
It ends at the ``</parameter>`` that another parameter or the function's end follows, so that a
value may speak of the format itself.
"""

from __future__ import annotations

import ast
import contextlib
import re
import warnings
from collections.abc import Callable, Mapping
from typing import Any

from octavo.server.tools.deltas import MARK
from octavo.server.tools.format import Format
from octavo.server.tools.json_text import inside_string, is_json, written
from octavo.server.tools.schemas import types_of
from octavo.server.tools.source import Malformed, Steps, Watch

_FUNCTION, _PARAMETER = "<function=", "<parameter="
_END_PARAMETER, _END_FUNCTION = "</parameter>", "</function>"
_NAME = re.compile("[^>\n\ud800-\udfff]+")
_NUMBER = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?([eE][-+]?\d+)?", re.ASCII)
_INTEGER = re.compile(r"-?\d+", re.ASCII)
_MOST_OF_PYTHON = 100_000  # characters
_END = Watch(["\n" + _END_PARAMETER, _END_PARAMETER])


class Qwen3Coder(Format):
    name = "qwen3_coder"
    MARKS = ("<tool_call>", "</tool_call>")
    BEGINS = ("<tool_call>",)
    EXAMPLE = (
        "<tool_call>\n<function=NAME>\n<parameter=PARAMETER>\nVALUE\n</parameter>\n</function>\n"
        "</tool_call>"
    )

    def run(self) -> Steps[None]:
        while begin := (yield from self.content_until("<tool_call>", _FUNCTION)):
            if (yield from self.attempt(self._calls(begin == _FUNCTION), begin)):
                yield from self.end_mark("</tool_call>")

    def _calls(self, begun: bool) -> Steps[None]:
        """One function, or more between the same marks."""
        if not begun:
            yield from self.source.spaces()
            yield from self.source.expect(_FUNCTION)
        while True:
            name = yield from self._name()
            name = self.known(name) if begun else self.named(name)
            yield from self.call(name, self._arguments(name))
            yield from self.source.spaces(self.sink.content)
            if not (yield from self.source.literal(_FUNCTION)):
                return

    def _name(self) -> Steps[str]:
        name = (yield from self.source.word(_NAME, 256)).strip()
        yield from self.source.expect(">")
        return name

    def _arguments(self, name: str) -> Steps[None]:
        schema = self.tools.get(name, {})
        properties = schema.get("properties")
        source, emit = self.source, self.sink.arguments
        emit("{")
        seen: set[str] = set()
        yield from source.spaces()
        while not (yield from source.literal(_END_FUNCTION)):
            yield from source.expect(_PARAMETER)
            key = yield from self._name()
            if key in seen:
                raise Malformed(f"two values for {key!r}")
            emit(f"{', ' if seen else ''}{written(key)}: ")
            seen.add(key)
            of_key = properties.get(key) if isinstance(properties, Mapping) else None
            yield from self._value(of_key, schema)
        emit("}")

    def _value(self, schema: Any, root: Mapping[str, Any]) -> Steps[None]:
        types = types_of(schema, root)
        emit = self.sink.arguments
        if types == {"string"}:  # as it comes
            emit('"')
            yield from self._text(lambda text: emit(inside_string(self._shown(text))))
            emit('"')
            return
        parts: list[str] = []
        yield from self._text(parts.append)
        emit(typed(self._shown("".join(parts)), schema, root))

    def _text(self, emit: Callable[[str], object]) -> Steps[None]:
        """A parameter's text, with its end mark; one line break at either end is not part of it."""
        source = self.source
        yield from source.literal("\n")
        while True:
            found = yield from source.until(_END, emit)
            if found is None:
                raise Malformed("a parameter without an end")
            space: list[str] = []
            yield from source.spaces(space.append)
            for follower in (_PARAMETER, _END_FUNCTION):
                if (yield from source.follows(follower)):
                    return
            emit(found + "".join(space))

    def _shown(self, text: str) -> str:
        """``text`` with marks in it as text."""
        if MARK.search(text):
            text = "".join(self.source.soft.get(char, char) for char in text)
            if MARK.search(text):
                raise Malformed("a control token in a value")
        return text


def typed(text: str, schema: Any, root: Mapping[str, Any]) -> str:
    """The JSON that a parameter's text stands for, by the types its schema allows; a string when
    it is none of them."""
    types = types_of(schema, root)
    word = text.strip()
    if schema is not None:
        if word in ("None", "null") and ("null" in types or not types):
            return "null"
        if word.lower() in ("true", "false") and ("boolean" in types or not types):
            return word.lower()
        whole = "integer" in types and _INTEGER.fullmatch(word)
        if _NUMBER.fullmatch(word) and (whole or "number" in types or not types):
            return word
        for kind, opener, python in (("object", "{", dict), ("array", "[", list)):
            if word.startswith(opener) and (kind in types or not types):
                if is_json(word):
                    return word
                with contextlib.suppress(Malformed):
                    if isinstance(found := _python(word), python):
                        return written(found)
        if types and "string" not in types and is_json(word):
            return word
    return written(text)


def _python(text: str) -> Any:
    if len(text) > _MOST_OF_PYTHON:
        raise Malformed("too long")
    try:
        with warnings.catch_warnings(action="ignore"):
            return ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        raise Malformed("no literal") from None
