"""Structural tags: free text in which some parts follow a grammar. Both forms of vLLM's, as a list
of llguidance grammars: the older ({structures, triggers}) and the newer ({format: {type: …}})."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from octavo.grammar.regexes import between_slashes
from octavo.types import InvalidRequest

FIELD = "structured_outputs.structural_tag"
TEXT = r"/(.|\n)*/"
MOST_FORMATS = 1000  # that one tag may be made of, and entries of each of its lists

Grammar = dict[str, Any]


def structural_grammars(
    tag: Grammar, json_grammar: Callable[[Grammar, str], Grammar], special: Mapping[str, int]
) -> list[Grammar]:
    """The grammar called main, and those that it refers to. ``json_grammar``: of a schema, with the
    field to name in errors; ``special``: id of each special token, which no text can spell.

    Raises InvalidRequest saying where the tag is not as it must be.
    """
    if tag.get("type") != "structural_tag":
        raise _fault("type", f"is {tag.get('type')!r}; it must be 'structural_tag'")
    writer = _Writer(json_grammar, special)
    if "format" in tag:
        if extra := [name for name in ("structures", "triggers") if name in tag]:
            raise _fault("format", f"and {extra[0]} are two forms of the same: send one")
        start = writer.format(tag["format"], "format", last=True)
    else:
        start = writer.triggered(_from_older(tag), "", last=True)
    writer.rules.append(f"start: {start}")
    lark = "\n".join(writer.rules)
    return [{"name": "main", "lark_grammar": lark}, *writer.grammars]


def _from_older(tag: Grammar) -> Grammar:
    structures = _list(tag, "structures", "")
    tags = []
    for index, structure in enumerate(structures):
        where = f"structures[{index}]"
        if not isinstance(structure, dict):
            raise _fault(where, "must be an object")
        content = {"type": "json_schema", "json_schema": structure.get("schema")}
        tags.append({**structure, "content": content})
    return {"triggers": _list(tag, "triggers", ""), "tags": tags}


class _Writer:
    """Collects rules of a Lark grammar, and the grammars beside it."""

    def __init__(
        self, json_grammar: Callable[[Grammar, str], Grammar], special: Mapping[str, int]
    ) -> None:
        self.rules: list[str] = []
        self.grammars: list[Grammar] = []
        self._json_grammar = json_grammar
        self._special = special
        # The longest first: one name may be the beginning of another.
        names = sorted(filter(None, special), key=len, reverse=True)
        self._names = re.compile(f"({'|'.join(map(re.escape, names))})" if names else "(?!)")
        self._count = 0
        self._formats: dict[str, Callable[[Grammar, str, bool], str]] = {
            "const_string": self._const_string,
            "json_schema": self._json_schema,
            "regex": self._regex,
            "any_text": self._any_text,
            "sequence": self._sequence,
            "or": self._or,
            "tag": lambda item, where, last: self._tag(item, where),
            "triggered_tags": self.triggered,
            "tags_with_separator": self._separated,
        }

    def format(self, item: Any, where: str, last: bool) -> str:
        """The right side of a rule. ``last``: nothing follows it, so it may be free text."""
        kind = item.get("type") if isinstance(item, dict) else None
        if not isinstance(kind, str) or kind not in self._formats:
            known = ", ".join(self._formats)
            raise _fault(f"{where}.type", f"is {kind!r}; the formats here are {known}")
        self._count += 1
        if self._count > MOST_FORMATS:
            raise _fault(where, f"is made of more than {MOST_FORMATS} formats")
        return self._formats[kind](item, where, last)

    def triggered(self, item: Grammar, where: str, last: bool) -> str:
        """Text, and after each trigger the rest of a tag that begins with it."""
        dot = f"{where}." if where else ""
        triggers = _list(item, "triggers", where)
        tags = _list(item, "tags", where)
        once = _flag(item, "stop_after_first", where)
        if not (last or once):
            raise _fault(where, "ends in free text, so nothing can follow it")
        groups: dict[str, list[str]] = {}
        for index, tag in enumerate(tags):
            place = f"{dot}tags[{index}]"
            begin = _text(tag, "begin", place)
            found = next((t for t in triggers if isinstance(t, str) and begin.startswith(t)), "")
            if not found:
                raise _fault(place, f"begins with {begin!r}, which starts with no trigger")
            groups.setdefault(found, []).append(self._tag(tag, place, skip=found))
        either = " | ".join(self._after(trigger, rests, dot) for trigger, rests in groups.items())
        name = self._rule(either)
        if once:
            return name if _flag(item, "at_least_one", where) else f"({name} | {TEXT})"
        return f"{name}{'+' if _flag(item, 'at_least_one', where) else '*'} {TEXT}"

    def _after(self, trigger: str, rests: list[str], dot: str) -> str:
        """Text up to and including a trigger, then one of the rests."""
        head, *more = self._pieces(trigger)
        if any(piece.startswith("<[") for piece in more):
            raise _fault(f"{dot}triggers", f"{trigger!r} has a special token that is not its first")
        rest = f"({' | '.join(rests)})"
        if head.startswith("<["):
            return self._rule(" ".join([TEXT, head, *more, rest]))
        return f"{self._rule(f'{TEXT} {head}', lazy=True)} {rest}"

    def _tag(self, tag: Any, where: str, skip: str = "") -> str:
        """``begin`` without ``skip``, the content, then the end."""
        if not isinstance(tag, dict):
            raise _fault(where, "must be an object")
        begin = " ".join(self._pieces(_text(tag, "begin", where)[len(skip) :]))
        content, ends = tag.get("content"), tag.get("end", "")
        ends = ends if isinstance(ends, list) else [ends]
        if not ends or not all(isinstance(end, str) for end in ends):
            raise _fault(f"{where}.end", "must be a text, or a list of texts")
        if isinstance(content, dict) and content.get("type") == "any_text":
            return f"{begin} ({' | '.join(self._until(end, where) for end in ends)})"
        body = self.format(content, f"{where}.content", last=False)
        end = " | ".join(" ".join(self._pieces(end)) or '""' for end in ends)
        return self._rule(f"{begin} {body} ({end})")

    def _until(self, end: str, where: str) -> str:
        head, *more = self._pieces(end) or [""]
        if not head:
            raise _fault(f"{where}.end", "is empty, so free text would never end")
        if head.startswith("<["):
            return self._rule(" ".join([TEXT, head, *more]))
        return " ".join([self._rule(f"{TEXT} {head}", lazy=True), *more])

    def _separated(self, item: Grammar, where: str, last: bool) -> str:
        tags = [self._tag(tag, f"{where}.tags[{i}]") for i, tag in
                enumerate(_list(item, "tags", where))]  # fmt: skip
        one = self._rule(" | ".join(tags))
        separator = " ".join(self._pieces(_text(item, "separator", where)))
        many = one if _flag(item, "stop_after_first", where) else f"{one} ({separator} {one})*"
        return many if _flag(item, "at_least_one", where) else f"[{many}]"

    def _const_string(self, item: Grammar, where: str, last: bool) -> str:
        pieces = self._pieces(_text(item, "value", where))
        if not pieces:
            raise _fault(f"{where}.value", "is empty")
        return " ".join(pieces)

    def _json_schema(self, item: Grammar, where: str, last: bool) -> str:
        schema = item.get("json_schema")
        if schema is True:
            schema = {}
        if not isinstance(schema, dict):
            raise _fault(f"{where}.json_schema", "must be a JSON schema (an object, or true)")
        return self._beside(self._json_grammar(schema, FIELD))

    def _regex(self, item: Grammar, where: str, last: bool) -> str:
        pattern = _text(item, "pattern", where)
        return self._beside({"lark_grammar": f"start: /{between_slashes(pattern)}/"})

    def _any_text(self, item: Grammar, where: str, last: bool) -> str:
        if not last:
            raise _fault(where, "any_text must be a tag's content, or come last")
        return TEXT

    def _sequence(self, item: Grammar, where: str, last: bool) -> str:
        elements = _list(item, "elements", where)
        final = len(elements) - 1
        return " ".join(
            self._rule(self.format(element, f"{where}.elements[{i}]", last and i == final))
            for i, element in enumerate(elements)
        )

    def _or(self, item: Grammar, where: str, last: bool) -> str:
        elements = _list(item, "elements", where)
        options = [self.format(e, f"{where}.elements[{i}]", last) for i, e in enumerate(elements)]
        return self._rule(" | ".join(options))

    def _pieces(self, text: str) -> list[str]:
        """The text as strings of Lark, and special tokens as ``<[id]>``."""
        parts = self._names.split(text)  # plain text and names by turns
        return [
            f"<[{self._special[part]}]>" if index % 2 else json.dumps(part)
            for index, part in enumerate(parts)
            if part
        ]

    def _rule(self, right: str, lazy: bool = False) -> str:
        name = f"r{len(self.rules)}"
        self.rules.append(f"{name}{'[lazy]' if lazy else ''}: {right}")
        return name

    def _beside(self, grammar: Grammar) -> str:
        name = f"part{len(self.grammars)}"
        self.grammars.append({"name": name, **grammar})
        return f"@{name}"


def _fault(where: str, what: str) -> InvalidRequest:
    return InvalidRequest(f"{FIELD}{'.' if where else ''}{where} {what}", FIELD)


def _list(item: Grammar, name: str, where: str) -> list[Any]:
    value = item.get(name)
    if not isinstance(value, list) or not value:
        raise _fault(f"{where}.{name}" if where else name, "must be a list that is not empty")
    if len(value) > MOST_FORMATS:
        said = f"has {len(value):,} entries; at most {MOST_FORMATS:,} are taken"
        raise _fault(f"{where}.{name}" if where else name, said)
    return value


def _text(item: Any, name: str, where: str) -> str:
    value = item.get(name) if isinstance(item, dict) else None
    if not isinstance(value, str):
        raise _fault(f"{where}.{name}" if where else name, "must be a text")
    return value


def _flag(item: Grammar, name: str, where: str) -> bool:
    value = item.get(name, False)
    if not isinstance(value, bool):
        raise _fault(f"{where}.{name}" if where else name, "must be true or false")
    return value
