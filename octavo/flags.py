"""Flags as fields of dataclasses: what a field says of its flag, and configurations from values."""

from __future__ import annotations

import difflib
from dataclasses import MISSING, field, fields, make_dataclass
from typing import Any, TypeVar

from octavo.types import ConfigError

C = TypeVar("C")


def flag(default: Any, help: str, *names: str, group: str, **extra: Any) -> Any:
    """A dataclass field that is also a command-line flag.

    ``names`` are further spellings (``-tp``). ``extra`` may hold ``choices``, ``kind`` ("bool",
    "int" with 32k / 32K spelling, "bytes", "float", "list", "json", "str"; derived from the type
    when absent), ``metavar``, ``top`` (shown by plain ``--help``), ``minimum`` and ``maximum``
    (inclusive; checked by ``from_flags``) and ``check`` (a function that raises ConfigError for a
    value it does not like).
    """
    metadata = {"help": help, "names": names, "group": group, **extra}
    if isinstance(default, (list, dict)):
        return field(default_factory=lambda: type(default)(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def internal(default: Any) -> Any:
    """A dataclass field among flags that no flag sets: octavo itself does."""
    return field(default=default, metadata={"internal": True})


def from_flags(config: type[C], values: dict[str, Any]) -> C:
    """Builds ``config`` from flat ``{field name: value}``; nested configurations take their own.

    Raises ConfigError for a name that is no field of it, and for a value out of its range.
    """
    known = {name for name, _ in flag_fields(config)}
    for name in values:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ConfigError(f"no setting is called {name}{hint}")
    return _from_flags(config, values)


def _from_flags(config: type[C], values: dict[str, Any]) -> C:
    own: dict[str, Any] = {}
    for f in fields(config):  # type: ignore[arg-type]
        if not f.metadata:
            own[f.name] = _from_flags(_nested(f), values)
        elif f.name in values and "internal" not in f.metadata:
            _check_value(f, values[f.name])
            own[f.name] = values[f.name]
    return config(**own)


def flag_fields(config: type) -> list[tuple[str, Any]]:
    """(name, field) of every flag of ``config`` and of the configurations nested in it."""
    found: list[tuple[str, Any]] = []
    for f in fields(config):
        if "internal" not in f.metadata:
            found += [(f.name, f)] if f.metadata else flag_fields(_nested(f))
    return found


def some_flags(config: type, *names: str) -> type:
    """A configuration of those flags of ``config`` alone, for commands that have no use for the
    others. Raises KeyError for a name that is none of them."""
    known = dict(flag_fields(config))
    chosen = [(name, known[name].type, _again(known[name])) for name in names]
    return make_dataclass(f"Some{config.__name__}", chosen, frozen=True)


def _again(f: Any) -> Any:
    if f.default_factory is not MISSING:
        return field(default_factory=f.default_factory, metadata=f.metadata)
    return field(default=f.default, metadata=f.metadata)


def _nested(f: Any) -> type:
    """The configuration that a field without flag metadata holds."""
    nested: type = f.default_factory
    return nested


def _check_value(f: Any, value: Any) -> None:
    """Raises ConfigError when ``value`` is not one that the field can take."""
    spelling = "--" + f.name.replace("_", "-")
    choices = f.metadata.get("choices")
    if choices and value is not None and value not in choices:
        raise ConfigError(f"{spelling} {value}: choose from {', '.join(map(str, choices))}")
    if "check" in f.metadata:
        f.metadata["check"](value)
    if value is None or isinstance(value, (str, list, dict)):
        return
    low, high = f.metadata.get("minimum"), f.metadata.get("maximum")
    if low is not None and not value >= low:
        raise ConfigError(f"{spelling} {value}: must be at least {low}")
    if high is not None and not value <= high:
        raise ConfigError(f"{spelling} {value}: must be at most {high}")
