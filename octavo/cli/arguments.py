"""The command line as a reading of configuration fields.

A command names the dataclasses whose fields are its flags (``octavo.flags.flag``); names, kinds,
help and defaults all come from them. ``_`` equals ``-`` in names, every boolean is ``--x/--no-x``,
JSON flags also take dotted keys (``--hf-overrides.rope_theta 1e6``), ``--config FILE.yaml`` gives
values that the command line overrides. One pass over the tokens, no other parser underneath.
"""

from __future__ import annotations

import difflib
import json
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from octavo.cli import values
from octavo.cli.foreign_flags import FLAGS_OF_LATER_VERSIONS, RETIRED_FLAGS, RETIRED_SWITCHES
from octavo.flags import C, flag_fields, from_flags
from octavo.types import ConfigError


class HelpRequested(Exception):
    """``--help`` (topic "") or ``--help=TOPIC`` was given."""

    def __init__(self, topic: str) -> None:
        super().__init__(topic)
        self.topic = topic


@dataclass(frozen=True)
class Command:
    """``configs`` are dataclasses whose fields are the flags of ``octavo NAME``."""

    name: str
    summary: str
    configs: tuple[type, ...]
    examples: tuple[str, ...] = ()
    migrating: bool = False  # also knows the flags of vLLM that are retired or come later


@dataclass
class Arguments:
    """What was given: ``values`` by field name (defaults are not in it), and lines to print."""

    values: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def build(self, config: type[C]) -> C:
        """The configuration with defaults filled in; ConfigError for a value out of range."""
        known = {name for name, _ in flag_fields(config)}
        return from_flags(config, {k: v for k, v in self.values.items() if k in known})


def kind_of(f: Any) -> str:
    """bool, int, int_or_auto, bytes, float, rate, list, json or str."""
    explicit = f.metadata.get("kind")
    if explicit:
        return str(explicit)
    kind: str = f.type.removesuffix(" | None")
    return kind if kind in ("bool", "int", "float") else "str"


def spelling_of(name: str) -> str:
    return "--" + name.replace("_", "-")


def fields_by_spelling(command: Command) -> dict[str, Any]:
    """Every way to write a flag. Where two flags share one (``-q``), it means the one of the config
    that the command names first."""
    found: dict[str, Any] = {}
    for config in command.configs:
        for name, f in flag_fields(config):
            for spelling in (spelling_of(name), *f.metadata["names"]):
                found.setdefault(spelling, f)
    return found


def parse(command: Command, tokens: list[str]) -> Arguments:
    """Reads ``tokens``; flags given here win over those of ``--config FILE``.

    Raises:
        ConfigError: an unknown flag (with the nearest known ones), a flag of a later version, a
            missing or unreadable value, an unreadable file.
        HelpRequested: help was asked for.
    """
    return _Reader(command).read(tokens)


_CONVERTERS: dict[str, Callable[[str], Any]] = {
    "bool": values.parse_bool,
    "int": values.parse_int,
    "bytes": values.parse_bytes,
    "float": values.parse_float,
    "rate": values.parse_rate,
    "list": values.parse_items,
    "json": values.parse_json,
    "str": str,
    "int_or_auto": lambda text: None if text in ("auto", "-1") else values.parse_int(text),
}


def to_tokens(config: type, given: dict[str, Any]) -> list[str]:
    """The command line that gives those of ``given`` that are fields of ``config``."""
    tokens: list[str] = []
    for name, f in flag_fields(config):
        if name not in given:
            continue
        value, spelling, kind = given[name], spelling_of(name), kind_of(f)
        if kind == "bool":
            tokens.append(spelling if value else "--no-" + spelling[2:])
        elif kind in ("list", "json"):
            tokens.append(f"{spelling}={json.dumps(value)}")
        else:
            tokens.append(f"{spelling}={'auto' if value is None else value}")
    return tokens


class _Reader:
    def __init__(self, command: Command) -> None:
        self.command = command
        self.fields = fields_by_spelling(command)
        self.negations = {  # --no-x -> field
            "--no-" + spelling.lstrip("-"): f
            for spelling, f in self.fields.items()
            if kind_of(f) == "bool"
        }
        self.positionals = [
            f
            for config in command.configs
            for _, f in flag_fields(config)
            if f.metadata.get("positional")
        ]

    def read(self, tokens: list[str]) -> Arguments:
        given = Arguments()
        dotted: dict[str, dict[str, Any]] = {}
        words: list[str] = []
        files: list[str] = []
        queue = deque(tokens)
        while queue:
            token = queue.popleft()
            if token == "--":
                words += queue
                break
            if not _is_flag(token):
                words.append(token)
                continue
            name, equals, text = token.partition("=")
            name, dot, key = name.partition(".")
            name = _normal(name)
            inline = text if equals else None
            if name in ("--help", "-h"):
                raise HelpRequested(inline or "")
            if name == "--config" and "--config" not in self.fields:
                files.append(_value(name, inline, queue))
            elif name in self.negations:
                if inline is not None:
                    raise ConfigError(f"{token}: {name} takes no value")
                given.values[self.negations[name].name] = False
            elif name not in self.fields:
                self._foreign(name, inline, queue, given)
            elif dot:
                f = self._json_field(name, key)
                _put(dotted.setdefault(f.name, {}), name, key, _value(token, inline, queue))
            else:
                self._take(self.fields[name], name, inline, queue, given)
        self._place(words, given)
        for path in files:
            for name, value in self._file(path, given).items():
                given.values.setdefault(name, value)
        for name, entries in dotted.items():
            given.values[name] = _merged(given.values.get(name) or {}, entries)
        return given

    def _take(
        self, f: Any, name: str, inline: str | None, queue: deque[str], given: Arguments
    ) -> None:
        kind = kind_of(f)
        if kind == "bool":
            given.values[f.name] = True if inline is None else _convert(f, name, inline)
        elif kind == "list":
            texts = [_value(name, inline, queue)]
            while inline is None and queue and not _is_flag(queue[0]):
                texts.append(queue.popleft())
            items = [item for text in texts for item in _convert(f, name, text)]
            given.values[f.name] = [*given.values.get(f.name, []), *items]
        else:
            given.values[f.name] = _convert(f, name, _value(name, inline, queue))

    def _json_field(self, name: str, key: str) -> Any:
        f = self.fields[name]
        if kind_of(f) != "json":
            raise ConfigError(f"{name}.{key}: {name} is not a JSON flag and takes no keys")
        return f

    def _foreign(self, name: str, inline: str | None, queue: deque[str], given: Arguments) -> None:
        """A flag that is not ours: retired, of a later version, or unknown."""
        if self.command.migrating:
            positive = "--" + name.removeprefix("--no-") if name.startswith("--no-") else name
            if positive in FLAGS_OF_LATER_VERSIONS:
                feature = FLAGS_OF_LATER_VERSIONS[positive]
                raise ConfigError(f"{name}: {feature}: not in this version; drop the flag")
            if positive in RETIRED_FLAGS:
                takes_value = positive not in RETIRED_SWITCHES and positive == name
                if takes_value and inline is None and queue and not _is_flag(queue[0]):
                    queue.popleft()
                given.notes.append(f"{name} has no effect: {RETIRED_FLAGS[positive]}")
                return
        raise ConfigError(
            f"unknown flag {name}{self._nearest(name)} (octavo {self.command.name} --help=all "
            "lists every flag)"
        )

    def _nearest(self, name: str) -> str:
        known = [*self.fields, *self.negations, "--config", "--help"]
        near = difflib.get_close_matches(name, known, n=3, cutoff=0.6)
        return f"; nearest: {', '.join(near)}" if near else ""

    def _place(self, words: list[str], given: Arguments) -> None:
        """Gives the words that follow no flag to the positional fields, in order."""
        for f, word in zip(self.positionals, words):
            before = given.values.get(f.name, word)
            if before != word:
                raise ConfigError(f"{f.name} is given twice: {before} and {word}")
            given.values[f.name] = _convert(f, f.name.upper(), word)
        extra = words[len(self.positionals) :]
        if extra:
            raise ConfigError(
                f"unexpected argument {extra[0]!r} "
                f"(octavo {self.command.name} --help shows the usage)"
            )

    def _file(self, path: str, given: Arguments) -> dict[str, Any]:
        import yaml

        try:
            content = yaml.safe_load(Path(path).expanduser().read_text())
        except OSError as error:
            raise ConfigError(f"--config {path}: cannot be read ({error.strerror})") from error
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            cause = " ".join(str(error).split())
            raise ConfigError(f"--config {path}: not YAML ({cause})") from error
        if not isinstance(content or {}, dict):
            raise ConfigError(f"--config {path}: must be a list of `flag: value` lines")
        found: dict[str, Any] = {}
        for key, value in (content or {}).items():
            name = _normal("--" + str(key))
            try:
                if name in self.fields:
                    found[self.fields[name].name] = _typed(self.fields[name], name, value)
                elif name in self.negations and isinstance(value, bool):
                    found[self.negations[name].name] = not value
                else:
                    self._foreign(name, str(value), deque(), given)
            except ConfigError as error:
                raise ConfigError(f"--config {path}: {error}") from error
        return found


def _is_flag(token: str) -> bool:
    if len(token) < 2 or token[0] != "-":
        return False
    return not (token[1].isdigit() or token[1] == "." or token[1].isspace())


def _normal(name: str) -> str:
    return name.replace("_", "-")


def _value(name: str, inline: str | None, queue: deque[str]) -> str:
    if inline is not None:
        return inline
    if not queue or _is_flag(queue[0]):
        raise ConfigError(f"{name} needs a value")
    return queue.popleft()


def _convert(f: Any, name: str, text: str) -> Any:
    try:
        return _CONVERTERS[kind_of(f)](text)
    except ValueError as error:
        raise ConfigError(f"{name} {text}: expected {error}") from None


def _typed(f: Any, name: str, value: Any) -> Any:
    """A YAML value as the field's kind."""
    kind = kind_of(f)
    if value is None:
        raise ConfigError(f"{name}: has no value")
    if kind == "list" and isinstance(value, list):
        return [str(item) for item in value]
    if kind == "json" and isinstance(value, dict):
        return value
    if kind == "bool" and isinstance(value, bool):
        return value
    if isinstance(value, (dict, list, bool)):
        raise ConfigError(f"{name}: expected {kind}, the file has {value!r}")
    return _convert(f, name, str(value))


def _put(target: dict[str, Any], name: str, path: str, text: str) -> None:
    *parents, last = path.split(".")
    for parent in parents:
        target = target.setdefault(parent, {})
        if not isinstance(target, dict):
            raise ConfigError(f"{name}.{path}: {name} has a plain value for {parent} already")
    target[last] = values.parse_scalar(text)


def _merged(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in over.items():
        old = merged.get(key)
        if isinstance(value, dict) and isinstance(old, dict):
            merged[key] = _merged(old, value)
        else:
            merged[key] = value
    return merged
