"""The text of ``--help``: the flags people need first, the rest by group on request."""

from __future__ import annotations

import shutil
import textwrap
from typing import Any

from octavo.cli.arguments import Command, fields_by_spelling, kind_of, spelling_of
from octavo.cli.foreign_flags import FLAGS_OF_LATER_VERSIONS, RETIRED_FLAGS
from octavo.flags import flag_fields

_METAVARS = {
    "int": "N",
    "int_or_auto": "N|auto",
    "bytes": "SIZE",
    "float": "X",
    "rate": "X",
    "list": "A B …",
    "json": "JSON",
    "str": "TEXT",
}
_CONFIG_LINE = ("--config FILE", "YAML file of flags; the command line wins over it")


def command_help(command: Command, topic: str) -> str:
    """``topic``: "" for the flags people need, "all", or a group's name or part of a flag's."""
    fields = [f for config in command.configs for _, f in flag_fields(config)]
    flags = [f for f in fields if not f.metadata.get("positional")]
    lines = [_usage(command, fields), "", *textwrap.wrap(command.summary, _width()), ""]
    for f in fields:
        if f.metadata.get("positional"):
            lines += [*_entry(f.name.upper(), _describe(f)), ""]
    owners = fields_by_spelling(command)
    some_are_top = any(f.metadata.get("top") for f in flags)
    if topic == "":
        shown = [f for f in flags if f.metadata.get("top") or not some_are_top]
        lines += [line for f in shown for line in _flag(f, owners)]
        lines += _entry(*_CONFIG_LINE)
        if len(shown) < len(flags):
            more = f"all {len(flags)} flags; --help=GROUP or --help=WORD some of them"
            lines += _entry("--help=all", more)
    elif topic == "all":
        lines += _by_group(flags, owners) + _entry(*_CONFIG_LINE)
        if command.migrating:
            lines += _foreign()
    else:
        shown = [f for f in flags if topic == f.metadata["group"]] or [
            f for f in flags if topic.replace("_", "-") in spelling_of(f.name)
        ]
        groups = sorted({f.metadata["group"] for f in flags})
        nothing = f"no flag matches {topic!r}; groups: {', '.join(groups)}"
        lines += _by_group(shown, owners) if shown else [nothing]
    if command.examples and topic in ("", "all"):
        lines += ["", "examples:", *(f"  {example}" for example in command.examples)]
    return "\n".join(lines)


def _width() -> int:
    return min(100, shutil.get_terminal_size((100, 24)).columns)


def _usage(command: Command, fields: list[Any]) -> str:
    words = [f"[{f.name.upper()}]" for f in fields if f.metadata.get("positional")]
    return " ".join(["usage: octavo", command.name, *words, "[flags]"])


def _by_group(flags: list[Any], owners: dict[str, Any]) -> list[str]:
    lines: list[str] = []
    for group in dict.fromkeys(f.metadata["group"] for f in flags):
        lines += [f"{group}:"]
        members = [f for f in flags if f.metadata["group"] == group]
        lines += [line for f in members for line in _flag(f, owners)]
        lines += [""]
    return lines


def _flag(f: Any, owners: dict[str, Any]) -> list[str]:
    """``owners``: spelling -> the flag that it means here."""
    kind = kind_of(f)
    spelling = spelling_of(f.name)
    others = [name for name in f.metadata["names"] if owners[name] is f]
    names = [f"--[no-]{spelling[2:]}" if kind == "bool" else spelling, *others]
    choices = f.metadata.get("choices")
    metavar = f.metadata.get("metavar") or (
        _METAVARS.get(kind, "")
        if not choices
        else "|".join(map(str, choices))
        if len(choices) <= 4
        else "NAME"
    )
    return _entry(f"{', '.join(names)} {metavar}".rstrip(), _describe(f))


def _describe(f: Any) -> str:
    text = str(f.metadata["help"]).replace("%%", "%")
    choices = f.metadata.get("choices")
    if choices and len(choices) > 4:
        text += f" [{', '.join(map(str, choices))}]"
    default = f.default
    if default is False or default == "" or not isinstance(default, (str, int, float)):
        return text
    shown = "on" if default is True else f"{default:g}" if isinstance(default, float) else default
    return f"{text} (default {shown})"


def _entry(left: str, text: str) -> list[str]:
    indent = 34
    wrapped = textwrap.wrap(text, _width() - indent) or [""]
    if len(left) > indent - 4:
        lines = [f"  {left}"]
    else:
        lines = [f"  {left:<{indent - 2}}{wrapped.pop(0)}"]
    return lines + [" " * indent + line for line in wrapped]


def _foreign() -> list[str]:
    lines = ["", "known, not in this version:"]
    lines += textwrap.wrap(
        " ".join(FLAGS_OF_LATER_VERSIONS),
        _width(),
        initial_indent="  ",
        subsequent_indent="  ",
        break_on_hyphens=False,
    )
    lines += ["", "accepted, without effect:"]
    for name, replacement in RETIRED_FLAGS.items():
        lines += _entry(name, replacement)
    return lines
