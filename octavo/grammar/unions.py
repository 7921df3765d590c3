"""``oneOf`` as ``anyOf``, which llguidance follows, where no value can match two of the options.

llguidance sees that itself of options that stand in place; not of references, as which pydantic
writes the options of a discriminated union.
"""

from __future__ import annotations

from itertools import combinations
from typing import Any

from octavo.grammar.keywords import LISTS, MAPS, NEUTRAL, SINGLE

Schema = dict[str, Any]
MOST_REFERENCES = 32  # followed from one option
MOST_OPTIONS = 100  # of a union: each is compared with each
MOST_COMPARED = 2_000_000  # names and values, in all unions of a schema: some 0.3 s


def with_plain_unions(schema: Schema) -> Schema:
    """A copy in which each ``oneOf`` whose options exclude each other is an ``anyOf``; without the
    keywords that ask for nothing."""
    rewritten: Schema = _Rewriter(schema).rewritten(schema)
    return rewritten


class _Rewriter:
    def __init__(self, root: Schema) -> None:
        self._root = root
        self._left = MOST_COMPARED

    def rewritten(self, node: Any) -> Any:
        """Only what holds schemas is gone through: values (const, enum, default) stay."""
        if not isinstance(node, dict):
            return node
        copy = {word: value for word, value in node.items() if word not in NEUTRAL}
        for word in MAPS:
            if isinstance(copy.get(word), dict):
                copy[word] = {name: self.rewritten(part) for name, part in copy[word].items()}
        for word in LISTS:
            if isinstance(copy.get(word), list):
                copy[word] = [self.rewritten(part) for part in copy[word]]
        for word in SINGLE:
            copy.update({word: self.rewritten(copy[word])} if word in copy else {})
        options = copy.get("oneOf")
        if not (isinstance(options, list) and self._exclusive(options)):
            return copy
        if "anyOf" not in copy:  # in its place: the order of properties follows that of keywords
            return {("anyOf" if word == "oneOf" else word): copy[word] for word in copy}
        del copy["oneOf"]
        return {**copy, "allOf": [*copy.get("allOf", []), {"anyOf": options}]}

    def _exclusive(self, options: list[Any]) -> bool:
        if len(options) > MOST_OPTIONS:
            return False
        resolved = [self._resolved(option) for option in options]
        return all(self._disjoint(first, second) for first, second in combinations(resolved, 2))

    def _resolved(self, node: Any) -> Any:
        """What a schema that is nothing but a reference refers to."""
        for _ in range(MOST_REFERENCES):
            reference = node.get("$ref") if isinstance(node, dict) else None
            if not isinstance(reference, str) or not reference.startswith("#/"):
                return node
            node = self._at(reference)
        return None

    def _at(self, reference: str) -> Any:
        node: Any = self._root
        for part in reference[2:].split("/"):
            name = part.replace("~1", "/").replace("~0", "~")
            if not isinstance(node, dict) or name not in node:
                return None
            node = node[name]
        return node

    def _disjoint(self, first: Any, second: Any) -> bool:
        """Whether no value matches both; False, too, where finding that out takes too long."""
        if not (isinstance(first, dict) and isinstance(second, dict)):
            return False
        self._left -= _num_compared(first) + _num_compared(second)
        if self._left < 0:
            return False
        kinds = _kinds(first), _kinds(second)
        if None not in kinds and not kinds[0] & kinds[1]:  # type: ignore[operator]
            return True
        values = _values(first), _values(second)
        if None not in values and not values[0] & values[1]:  # type: ignore[operator]
            return True
        if not all(kind == {"object"} for kind in kinds):
            return False
        # What matches both has the properties that either requires.
        names = {*_required(first), *_required(second)}
        return any(
            self._disjoint(_property(first, name), _property(second, name)) for name in names
        )


def _num_compared(schema: Schema) -> int:
    lists = (schema.get(word) for word in ("type", "enum", "required"))
    return 1 + sum(len(found) for found in lists if isinstance(found, list))


def _kinds(schema: Schema) -> set[str] | None:
    found = schema.get("type")
    if isinstance(found, str):
        found = [found]
    if not isinstance(found, list) or not all(isinstance(kind, str) for kind in found):
        return None
    return {"number" if kind == "integer" else kind for kind in found}


def _values(schema: Schema) -> set[str] | None:
    """The texts that are the only values; None where there may be others."""
    found = [schema["const"]] if "const" in schema else schema.get("enum")
    if not isinstance(found, list) or not all(isinstance(value, str) for value in found):
        return None
    return set(found)


def _required(schema: Schema) -> list[str]:
    found = schema.get("required")
    return [name for name in found if isinstance(name, str)] if isinstance(found, list) else []


def _property(schema: Schema, name: str) -> Any:
    properties = schema.get("properties")
    return properties.get(name) if isinstance(properties, dict) else None
