"""What one rendering of a chat template may take: turns, seconds, and the size of what it makes,
which is found before it is made."""

from __future__ import annotations

import re
import time
from collections.abc import ItemsView, Iterable, KeysView, Mapping, Sequence, ValuesView
from contextvars import ContextVar
from typing import Any, NoReturn

import jinja2
from jinja2.utils import Namespace

MOST_TURNS = 2_000_000  # of loops, and calls of macros
MOST_SECONDS = 10.0
# Of one string, and of all that are made; of a long conversation so many times its own length: what
# a template makes of it stands in proportion to what was sent. One call of C, during which nothing
# else runs, goes through 4 Mi characters in some 50 ms.
MOST_CHARACTERS, TIMES_GIVEN = 1 << 22, 2
MOST_CHARACTERS_IN_ALL, TIMES_GIVEN_IN_ALL = 1 << 26, 8
MOST_DIGITS = 10_000  # bits of an integer
MOST_ENTRIES = 1 << 17  # of one list, a little more than Jinja's ranges have
MOST_WIDTH = 1 << 20  # of padding, indents, rows
MOST_INDENT = 64  # of JSON: of each level; and its separators
MOST_SLOW = 1 << 16  # characters, of what takes time in their square
# What an entry of a list takes, counted as characters: one that exists, and one made for it.
REFERENCE, OBJECT = 8, 32

# What a rendering may take of a thread that has other things to do (``brief``).
BRIEF_TURNS = 2_000
BRIEF_SECONDS = 0.01
BRIEF_CHARACTERS = 1 << 15

# In a format: a width of a million or more, one that is an argument.
_WIDE_FORMAT = re.compile(r"%[^a-zA-Z%]*(\d{7}|\*)|:[^{}]*\d{7}[^{}]*\}")
_WIDTH_GIVEN = re.compile(r"\{[^{}]*:[^{}]*\{")


class NotBrief(Exception):
    """A rendering inside ``brief`` takes more than a busy thread can give. Nothing is wrong with
    it: the same outside of ``brief`` may succeed."""


class Budget:
    """What is left to one rendering."""

    def __init__(self, brief: bool, given: int) -> None:
        """``given``: characters of what the template is given."""
        self.brief = brief
        self.turns = BRIEF_TURNS if brief else MOST_TURNS
        self.most = max(MOST_CHARACTERS, TIMES_GIVEN * given)
        self.most_in_all = max(MOST_CHARACTERS_IN_ALL, TIMES_GIVEN_IN_ALL * given)
        self.characters = BRIEF_CHARACTERS if brief else self.most_in_all
        self.deadline = time.monotonic() + (BRIEF_SECONDS if brief else MOST_SECONDS)

    def turn(self, characters: int) -> None:
        self.turns -= 1
        if self.turns < 0:
            self.refuse(f"it takes more than {MOST_TURNS:,} turns of loops")
        if time.monotonic() > self.deadline:
            self.refuse(f"it takes more than {MOST_SECONDS:g} s")
        self.charge(characters)

    def charge(self, characters: int) -> None:
        self.characters -= characters
        if self.characters < 0:
            self.refuse(f"it makes more than {self.most_in_all:,} characters of text")

    def refuse(self, why: str) -> NoReturn:
        if self.brief:
            raise NotBrief
        raise jinja2.TemplateError(why)


current: ContextVar[Budget | None] = ContextVar("budget", default=None)


def check_size(size: int) -> None:
    """Of a text that is to be made."""
    budget = current.get()
    if budget is not None and budget.brief and size > BRIEF_CHARACTERS:
        raise NotBrief
    most = MOST_CHARACTERS if budget is None else budget.most
    if size > most:
        _refuse(f"it makes a text of {size:,} characters, more than {most:,}")


def check_entries(num_entries: int) -> None:
    """Of a list that is to be made."""
    budget = current.get()
    if budget is not None and budget.brief and num_entries * REFERENCE > BRIEF_CHARACTERS:
        raise NotBrief
    if num_entries > MOST_ENTRIES:
        _refuse(f"it makes a list of {num_entries:,} entries, more than {MOST_ENTRIES:,}")


def _refuse(why: str) -> NoReturn:
    raise jinja2.TemplateError(why)


def text_size(value: Any) -> int:
    """About the characters that ``str`` or JSON would write of a value, without writing them."""
    return _measured(value, {})[0]


def _measured(value: Any, known: dict[int, tuple[int, int]]) -> tuple[int, int]:
    """Characters, and levels of nesting. ``known``: of lists by their ids; one list may stand in
    many places."""
    if isinstance(value, (str, bytes)):
        return len(value), 0
    if isinstance(value, int):
        return 1 + value.bit_length() // 3, 0
    parts = _parts(value)
    if parts is None:
        return 24, 0
    if id(value) not in known:
        known[id(value)] = (0, 0)  # should it hold itself
        size, depth = 2, 0
        for part in parts:
            inner = _measured(part, known)
            size += 4 + inner[0]
            depth = max(depth, inner[1])
        known[id(value)] = size, depth + 1
    return known[id(value)]


def _parts(value: Any) -> Iterable[Any] | None:
    if isinstance(value, Namespace):
        value = getattr(value, "_Namespace__attrs")  # noqa: B009
    if isinstance(value, Mapping):
        return [*value.keys(), *value.values()]
    if isinstance(value, (list, tuple, set, frozenset, KeysView, ValuesView, ItemsView)):
        return value
    return None


def check_operands(operator: str, left: Any, right: Any) -> None:
    if isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length()
        size = {"*": bits + right.bit_length(), "**": bits * max(right, 0)}.get(operator, 0)
        if size > MOST_DIGITS:
            _refuse(f"it computes an integer of {size:,} bits")
    elif operator == "%" and isinstance(left, (str, bytes)):
        _check_format(left, right)
    elif operator == "*":
        for sequence, times in ((left, right), (right, left)):
            if hasattr(sequence, "__len__") and isinstance(times, int):
                _check_sequence(sequence, len(sequence) * times)
    elif operator == "+" and hasattr(left, "__len__") and hasattr(right, "__len__"):
        _check_sequence(left, len(left) + len(right))


def _check_sequence(kind: Any, length: int) -> None:
    if isinstance(kind, (str, bytes)):
        check_size(length)
    else:
        check_entries(length)


def _check_format(form: str | bytes, *values: Any) -> None:
    text = form if isinstance(form, str) else form.decode("latin-1")
    if _WIDE_FORMAT.search(text):
        _refuse("it pads to more than a million characters")
    if _WIDTH_GIVEN.search(text):
        _check_widths(values)
    fields = max(text.count("%"), text.count("{"))
    check_size(len(text) + fields * max(map(text_size, values), default=0))


def _check_widths(values: Iterable[Any], most: int = MOST_WIDTH) -> None:
    for value in values:
        if isinstance(value, int) and value > most:
            _refuse(f"it pads, indents or repeats to {value:,}")


def _check_replace(text: Any, old: Any, new: Any) -> None:
    check_size(len(text) + text.count(old) * max(len(new) - len(old), 0))


def _check_join(separator: Any, values: Any) -> None:
    if hasattr(values, "__len__"):
        check_size(len(separator) * len(values) + text_size(values))


def check_call(
    name: str, owner: str | bytes | int, arguments: tuple[Any, ...], named: Mapping[str, Any]
) -> None:
    """Of a method of a text or a number: before what it makes is made."""
    values = (*arguments, *named.values())
    if isinstance(owner, int):
        _check_widths(values if name == "to_bytes" else ())
    elif name in ("center", "ljust", "rjust", "zfill", "expandtabs"):
        _check_widths(values)
        if name == "expandtabs":
            text = owner if isinstance(owner, str) else owner.decode("latin-1")
            width = max((v for v in values if isinstance(v, int)), default=8)
            check_size(len(text) + text.count("\t") * width)
    elif name == "replace" and len(arguments) > 1:
        if type(owner) is type(arguments[0]) is type(arguments[1]):
            _check_replace(owner, arguments[0], arguments[1])
    elif name == "join" and arguments:
        _check_join(owner, arguments[0])
    elif name == "translate" and values:
        table = values[0].values() if isinstance(values[0], Mapping) else ()
        check_size(len(owner) * max(map(text_size, table), default=1))
    elif name in ("split", "rsplit", "splitlines"):
        separator = arguments[0] if arguments else named.get("sep")
        if name != "splitlines" and isinstance(separator, type(owner)):
            check_entries(owner.count(separator))  # type: ignore[arg-type]
        else:
            check_entries(len(owner) // 32)  # words and lines are longer, as a rule
    elif name in ("format", "format_map"):
        _check_format(owner, *values)


# Filters that take a width, that are slow, and that make no text of the lists they are given.
_WIDE = ("center", "indent", "batch", "slice", "round", "wordwrap")
_SLOW = ("title", "wordwrap", "urlize", "pprint", "striptags", "xmlattr")
_OF_LISTS = {
    *("list", "first", "last", "length", "count", "map", "select", "reject", "selectattr"),
    *("rejectattr", "sort", "reverse", "unique", "groupby", "batch", "slice", "sum", "min", "max"),
    *("items", "dictsort", "attr", "default", "d", "random"),
}
_OF_TEXTS = {"first", "last", "length", "count", "reverse", "default", "d"}  # take them whole


def check_filter(name: str, own: Sequence[Any], named: Mapping[str, Any]) -> None:
    """``own``: the value, then the arguments."""
    if not own:
        return
    value, values = own[0], (*own[1:], *named.values())
    if name in _OF_LISTS:
        if isinstance(value, (str, bytes)) and name not in _OF_TEXTS:
            check_entries(len(value))
    else:
        check_size(text_size(value))
    if name in _SLOW and (size := text_size(value)) > MOST_SLOW:
        _refuse(f"{name} of {size:,} characters takes too long")
    if name in _WIDE:
        _check_widths(values)
    if name == "indent":
        width = max((v if isinstance(v, int) else text_size(v) for v in values), default=4)
        check_size(text_size(value) + str(value).count("\n") * width)
    elif name == "tojson":
        _check_json(value, values)
    elif name == "replace" and len(own) > 2:
        _check_replace(str(value), str(own[1]), str(own[2]))
    elif name == "join":
        _check_join(str(values[0]) if values else "", value)
    elif name == "format":
        _check_format(str(value), *values)


def _check_json(value: Any, options: Iterable[Any]) -> None:
    widest = 0
    for option in options:
        width = option if isinstance(option, int) else text_size(option)
        _check_widths([width], MOST_INDENT)
        widest = max(widest, width)
    size, depth = _measured(value, {})
    check_size(size + size // 4 * depth * widest)  # an entry is counted as 4 characters at least
