"""Typed reading of a quantization config, whose errors name the file, the field, the value and what
is supported; and the ways in which configs name modules."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from octavo.types import ConfigError

_SHOWN = 120  # characters of a value in an error
_ENDLESS = re.compile(r"[*+]|\{\d*,\d*\}")  # or nearly so
_REPEATS = 6  # in a regular expression for names, whose time is a name's length to that power


@dataclass(frozen=True)
class Fields:
    """``values`` of the file ``where``, in which they stand at ``path`` ("" or
    ``quantization_config.``). Each reader takes a field's names: the first that is not null counts.
    """

    values: Mapping[str, Any]
    where: str
    path: str = ""

    def get(self, *names: str) -> tuple[str, Any]:
        """The name that is there, and its value; the first and None where none is."""
        for name in names:
            if self.values.get(name) is not None:
                return name, self.values[name]
        return names[0], None

    def integer(self, *names: str, default: int | None = None) -> int:
        name, value = self.get(*names)
        value = default if value is None else value
        if type(value) is not int:
            raise self.error(name, value, "an integer")
        return value

    def boolean(self, *names: str) -> bool | None:
        """None where it says nothing."""
        name, value = self.get(*names)
        if value is not None and type(value) is not bool:
            raise self.error(name, value, "true or false")
        return value

    def choice(self, *names: str, allowed: Sequence[Any], default: Any = None) -> Any:
        """Text is compared in lower case."""
        name, value = self.get(*names)
        value = default if value is None else value
        value = value.lower() if isinstance(value, str) else value
        if not any(type(value) is type(one) and value == one for one in allowed):
            raise self.error(name, value, " or ".join(map(str, allowed)))
        return value

    def names(self, *names: str) -> tuple[str, ...]:
        """A list of names; () where there is none."""
        name, value = self.get(*names)
        if value is None:
            return ()
        if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
            raise self.error(name, value, "a list of names")
        return tuple(value)

    def mapping(self, name: str) -> Mapping[str, Any]:
        value = self.values.get(name)
        if value is None:
            return {}
        if not isinstance(value, Mapping):
            raise self.error(name, value, "a JSON object")
        return value

    def inner(self, name: str) -> Fields:
        return Fields(self.mapping(name), self.where, f"{self.path}{name}.")

    def group_size(self, *names: str, default: int | None = None) -> int:
        """Inputs that share a scale; 0 for all of them, which files call -1."""
        name, value = self.get(*names)
        value = default if value is None else value
        if type(value) is int and value == -1:
            return 0
        if type(value) is not int or value < 4 or value % 4:
            raise self.error(name, value, "-1 or a multiple of 4")
        return value

    def error(self, name: str, value: object, supported: str) -> ConfigError:
        shown = repr(value)
        shown = shown if len(shown) <= _SHOWN else f"{shown[:_SHOWN]}..."
        said = "is not there" if value is None else f"is {shown}"
        return ConfigError(f"{self.where}: {self.path}{name} {said}; supported: {supported}")


def pattern(text: str, fields: Fields, name: str) -> re.Pattern[str]:
    """Raises ConfigError for what is no regular expression, and for one that may search for ages:
    what repeats within what repeats tries each way of sharing a name among the two, and their
    number doubles with every character."""
    try:
        found = re.compile(text)
    except (re.error, ValueError, OverflowError, RecursionError, MemoryError) as error:
        reason = f"no regular expression: {str(error)[:_SHOWN]}"
    else:
        if not _repeats_within(text):
            return found
        reason = "its repetitions are nested or many, so that it may search without end"
    shown = text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
    raise ConfigError(f"{fields.where}: {fields.path}{name} holds {shown!r}: {reason}")


def _repeats_within(text: str) -> bool:
    """Whether a group of the regular expression is repeated without end that holds what is, too, or
    alternatives, which may be read in several ways; or more than ``_REPEATS`` follow each other."""
    bare = re.sub(r"\\.", "a", text, flags=re.DOTALL)  # an escaped character
    bare = re.sub(r"\[\^?\]?[^]]*\]", "a", bare)  # a class
    group = re.compile(r"\(([^()]*)\)")
    while found := group.search(bare):  # an innermost one, which becomes a letter
        inner, rest = found[1], bare[found.end() :]
        is_loose = "|" in inner or _ENDLESS.search(inner) is not None
        if is_loose and _ENDLESS.match(rest):
            return True
        bare = f"{bare[: found.start()]}{'a+' if is_loose else 'a'}{rest}"
    return any(len(_ENDLESS.findall(one)) > _REPEATS for one in bare.split("|"))


def named_by(names: Collection[str], fields: Fields, name: str) -> Callable[[str], bool]:
    """Whether a module is named by one of ``names``: its own name, or some of its parts that follow
    one another (``lm_head``, ``mlp.gate``, ``model.layers.0``), or ``re:`` and a regular expression
    for its beginning.

    Tools differ in whether ``gate`` also names ``gate_proj``. Here it does not: a module taken for
    a quantized one is still dense where the checkpoint holds it so, the other way round is an
    error."""
    patterns = [pattern(one[3:], fields, name) for one in names if one.startswith("re:")]
    plain = {f".{one.strip('.')}." for one in names if not one.startswith("re:")}

    def is_named(module: str) -> bool:
        dotted = f".{module}."
        return any(one in dotted for one in plain) or any(p.match(module) for p in patterns)

    return is_named
