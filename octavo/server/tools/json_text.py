"""JSON as it comes: passed on while it is the beginning of a valid text (RFC 8259).

Two things differ from "verbatim": control characters inside a string, which models write and JSON
forbids, are escaped; a number or a name (true) comes when it is whole.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from octavo.server.tools.source import Malformed, Source, Steps

MAX_DEPTH = 200  # as in requests, in which the arguments come back
_MOST_OF_SCALAR = 1000  # characters
_PLAIN = re.compile('[^"\\\\\x00-\x1f\ud800-\udfff]+')
_SCALAR = re.compile("[-+.0-9A-Za-z]+")
_VALID_SCALAR = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?([eE][-+]?\d+)?|true|false|null", re.ASCII)
_ESCAPE = re.compile(r'\\(["\\/bfnrt]|u[0-9a-fA-F]{4})')
_SURROGATE = re.compile("[\ud800-\udfff]")
_CLOSER = {"{": "}", "[": "]"}

Emit = Callable[[str], object]


def value(source: Source, emit: Emit) -> Steps[None]:
    """One JSON value; what follows it is not read. Raises Malformed."""
    closers: list[str] = []
    expected = "value"
    while True:
        yield from source.spaces(emit)
        char = yield from source.peek()
        if not char:
            raise Malformed("the text ends inside a value")
        if expected in ("first key", "first item", "comma") and closers[-1] == char:
            emit(source.take(1))
            closers.pop()
        elif expected == "comma":
            yield from source.expect(",")
            emit(",")
            expected = "key" if closers[-1] == "}" else "value"
            continue
        elif expected in ("first key", "key"):
            yield from string(source, emit)
            yield from source.spaces(emit)
            yield from source.expect(":")
            emit(":")
            expected = "value"
            continue
        elif char in _CLOSER:
            if len(closers) == MAX_DEPTH:
                raise Malformed(f"more than {MAX_DEPTH} levels")
            emit(source.take(1))
            closers.append(_CLOSER[char])
            expected = "first key" if char == "{" else "first item"
            continue
        elif char == '"':
            yield from string(source, emit)
        else:
            word = yield from source.word(_SCALAR, _MOST_OF_SCALAR)
            if not _VALID_SCALAR.fullmatch(word):
                raise Malformed(f"{word!r} is no value")
            emit(word)
        if not closers:
            return
        expected = "comma"


def string(source: Source, emit: Emit) -> Steps[None]:
    """One JSON string, with its quotes."""
    yield from source.expect('"')
    emit('"')
    while True:
        if run := source.run(_PLAIN):
            emit(run)
        char = yield from source.peek()
        if char == '"':
            emit(source.take(1))
            return
        if char == "\\":
            emit((yield from _escape(source)))
        elif char and char < " ":
            emit(inside_string(source.take(1)))
        elif char in source.soft:
            source.take(1)
            emit(inside_string(source.soft[char]))
        elif not char or _SURROGATE.match(char):
            raise Malformed("the string has no end")


def _escape(source: Source) -> Steps[str]:
    text = yield from source.peek(2)
    if text == "\\u":
        text = yield from source.peek(6)
    if not _ESCAPE.fullmatch(text):
        raise Malformed(f"{text!r} is no escape")
    return source.take(len(text))


def collected(source: Source, read: Callable[[Source, Emit], Steps[None]]) -> Steps[str]:
    """The text that ``read`` emits."""
    parts: list[str] = []
    yield from read(source, parts.append)
    return "".join(parts)


def decoded_string(source: Source) -> Steps[str]:
    """What a JSON string stands for. Raises Malformed when that is not valid Unicode."""
    text = str(json.loads((yield from collected(source, string))))
    if _SURROGATE.search(text):
        raise Malformed("half a surrogate pair")
    return text


def is_json(text: str) -> bool:
    """Whether ``text`` is JSON as ``value`` takes it, with nothing after it."""
    parts: list[str] = []
    source = Source(text, ended=True)
    try:
        for _ in value(source, parts.append):
            pass
    except Malformed:
        return False
    return "".join(parts) == text.rstrip(" \t\r\n")


def is_object(text: str) -> bool:
    return text.startswith("{") and is_json(text)


def inside_string(text: str) -> str:
    """``text`` as it stands inside a JSON string's quotes."""
    return written(text)[1:-1]


def written(value: Any) -> str:
    """JSON of a value; half surrogate pairs as escapes. Raises Malformed for NaN and infinity."""
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (ValueError, RecursionError, TypeError):
        raise Malformed("not a value of JSON") from None
    return _SURROGATE.sub(lambda found: f"\\u{ord(found[0]):04x}", text)
