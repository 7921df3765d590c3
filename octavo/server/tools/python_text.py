"""Python literals as they come, turned into JSON text.

Strings, numbers, True, False, None (and JSON's own names), lists, tuples and dictionaries with
constant keys. No expression, no f-string, no bytes: Malformed.
"""

from __future__ import annotations

import ast
import re
import warnings

from octavo.server.tools.json_text import MAX_DEPTH, Emit, inside_string, written
from octavo.server.tools.source import Malformed, Source, Steps

_MOST_OF_SCALAR = 1000
_SCALAR = re.compile("[-+.0-9A-Za-z_]+")
_NAMES = {
    "True": "true",
    "False": "false",
    "None": "null",
    "true": "true",
    "false": "false",
    "null": "null",
}
_PLAIN = {
    '"': re.compile('[^"\\\\\ud800-\udfff]+'),
    "'": re.compile("[^'\\\\\ud800-\udfff]+"),
}
_SIMPLE = {"n": "\n", "t": "\t", "r": "\r", "a": "\a", "b": "\b", "f": "\f", "v": "\v"}
_SIMPLE |= {"\\": "\\", "'": "'", '"': '"', "\n": ""}
_NUM_DIGITS = {"x": 2, "u": 4, "U": 8}
_HEX = re.compile("[0-9a-fA-F]+")
_OCTAL = re.compile("[0-7]{1,3}")
_CLOSER = {"[": "]", "(": ")", "{": "}"}


def value(source: Source, emit: Emit, depth: int = 0) -> Steps[None]:
    """One literal; what follows it is not read. Raises Malformed."""
    char = yield from source.peek()
    if char in ("'", '"'):
        yield from string(source, emit)
    elif char in _CLOSER:
        if depth == MAX_DEPTH:
            raise Malformed(f"more than {MAX_DEPTH} levels")
        source.take(1)
        yield from _members(source, emit, char, depth + 1)
    else:
        emit((yield from scalar(source)))


def _members(source: Source, emit: Emit, opener: str, depth: int) -> Steps[None]:
    """A list, tuple or dictionary after its first character."""
    closer = _CLOSER[opener]
    emit("{" if opener == "{" else "[")
    num, comma = 0, False
    while True:
        yield from source.spaces()
        if (yield from source.literal(closer)):
            if opener == "(" and num == 1 and not comma:
                raise Malformed("a value in parentheses, which is no tuple")
            emit("}" if opener == "{" else "]")
            return
        if num and not comma:
            raise Malformed("no comma")
        if num:
            emit(", ")
        if opener == "{":
            yield from _key(source, emit)
        yield from value(source, emit, depth)
        num += 1
        yield from source.spaces()
        comma = yield from source.literal(",")


def _key(source: Source, emit: Emit) -> Steps[None]:
    if (yield from source.peek()) in ("'", '"'):
        yield from string(source, emit)
    else:
        emit(f'"{(yield from scalar(source))}"')
    yield from source.spaces()
    yield from source.expect(":")
    emit(": ")
    yield from source.spaces()


def scalar(source: Source) -> Steps[str]:
    """A number or a name, as JSON."""
    word = yield from source.word(_SCALAR, _MOST_OF_SCALAR)
    if word in _NAMES:
        return _NAMES[word]
    try:
        with warnings.catch_warnings(action="ignore"):
            number = ast.literal_eval(word)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        raise Malformed(f"{word!r} is no literal") from None
    if type(number) not in (int, float):
        raise Malformed(f"{word!r} is no literal")
    return written(number)


def string(source: Source, emit: Emit) -> Steps[None]:
    """One string literal, in one of Python's four kinds of quotes. A line break may stand in it in
    any case: models do not always write ``\\n``."""
    quote = yield from source.peek()
    end = quote
    if (yield from source.literal(quote * 3)):
        end = quote * 3
    else:
        source.take(1)
    emit('"')
    while True:
        if run := source.run(_PLAIN[quote]):
            emit(inside_string(run))
        if (yield from source.literal(end)):
            emit('"')
            return
        char = yield from source.peek()
        if char == "\\":
            emit(inside_string((yield from _escape(source))))
        elif char == quote:
            emit(inside_string(source.take(1)))
        elif char in source.soft:
            source.take(1)
            emit(inside_string(source.soft[char]))
        elif not char or "\ud800" <= char <= "\udfff":
            raise Malformed("the string has no end")


def _escape(source: Source) -> Steps[str]:
    """What an escape stands for; one that Python does not know is itself."""
    pair = yield from source.peek(2)
    if len(pair) < 2:
        raise Malformed("the string has no end")
    kind = pair[1]
    if kind in _SIMPLE:
        source.take(2)
        return _SIMPLE[kind]
    if kind in _NUM_DIGITS:
        size = 2 + _NUM_DIGITS[kind]
        text = yield from source.peek(size)
        if len(text) < size or not _HEX.fullmatch(text, 2) or int(text[2:], 16) > 0x10FFFF:
            raise Malformed(f"{text!r} is no escape")
        source.take(size)
        return chr(int(text[2:], 16))
    if _OCTAL.match(kind):
        text = yield from source.peek(4)
        found = _OCTAL.match(text, 1)
        assert found is not None
        source.take(1 + len(found[0]))
        return chr(int(found[0], 8))
    if "\ud800" <= kind <= "\udfff":
        raise Malformed("the string has no end")
    return source.take(2)
