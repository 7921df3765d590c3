"""Which keywords of JSON Schema are enforced. llguidance refuses those that it knows and has not
implemented, but passes over any other word: a misspelt one would silently constrain nothing."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from typing import Any

from octavo.types import InvalidRequest

# Enforced by llguidance, or refused by it with a message of its own.
ENFORCED = {
    *("type", "enum", "const", "anyOf", "oneOf", "allOf", "$ref", "$defs", "definitions"),
    *("properties", "required", "additionalProperties", "patternProperties"),
    *("minProperties", "maxProperties"),
    *("items", "prefixItems", "additionalItems", "minItems", "maxItems"),
    *("pattern", "minLength", "maxLength", "format"),
    *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
}
# Say nothing about which values are valid.
ANNOTATIONS = {
    *("$schema", "$id", "id", "$comment", "$anchor", "title", "description", "default", "examples"),
    *("example", "deprecated", "readOnly", "writeOnly", "discriminator", "externalDocs", "xml"),
}
# Part of JSON Schema, and not enforced.
UNSUPPORTED = {
    *("not", "if", "then", "else", "contains", "minContains", "maxContains", "uniqueItems"),
    *("propertyNames", "dependentRequired", "dependentSchemas", "dependencies"),
    *("unevaluatedProperties", "unevaluatedItems", "contentEncoding", "contentMediaType"),
    *("contentSchema", "$dynamicRef", "$dynamicAnchor", "$recursiveRef", "$recursiveAnchor"),
    *("$vocabulary", "nullable"),
}
# Values with which an unsupported keyword asks for nothing.
NEUTRAL: dict[str, Any] = {"uniqueItems": False, "nullable": False}
# Keywords whose values are schemas.
MAPS = ("properties", "patternProperties", "$defs", "definitions")  # name -> schema
LISTS = ("anyOf", "oneOf", "allOf", "prefixItems", "items")
SINGLE = ("items", "additionalProperties", "additionalItems")
# Properties in a row that may be left out. Each of them may come next, for which llguidance keeps
# four items; beyond 2,000 it gives up in the middle of an output.
MOST_OPTIONAL = 450


def check_keywords(schema: Any, field: str) -> None:
    """Raises InvalidRequest, naming the place, for a keyword that would constrain nothing, and for
    what stands in a schema's place and is none. Other values are left to llguidance, which refuses
    those that are not as they must be.
    """
    pending: list[tuple[Any, Place]] = [(schema, None)]
    while pending:
        node, place = pending.pop()
        if isinstance(node, bool):
            continue
        if not isinstance(node, dict):
            raise InvalidRequest(
                f"{field}{_path(place)} is {_shown(node)}; a schema is an object, true or false",
                field,
            )
        for word, value in node.items():
            if word in NEUTRAL and value is NEUTRAL[word]:
                continue
            if word not in ENFORCED and word not in ANNOTATIONS and not word.startswith("x-"):
                raise InvalidRequest(f"{field}{_path(place)}: {_why_not(word)}", field)
        if "x-guidance" in node:
            raise InvalidRequest(
                f"{field}{_path(place)}: x-guidance cannot be set in a schema", field
            )
        if (count := _optional_in_a_row(node)) > MOST_OPTIONAL:
            raise InvalidRequest(
                f"{field}{_path(place)}: {count} properties in a row are optional, at most "
                f"{MOST_OPTIONAL} can be followed; require some, or put them into objects of "
                "their own",
                field,
            )
        pending += _subschemas(node, place)


def _optional_in_a_row(node: dict[str, Any]) -> int:
    """The most properties that follow one another, as they are to come, and are not required."""
    properties, required = node.get("properties"), node.get("required")
    if not isinstance(properties, dict) or len(properties) <= MOST_OPTIONAL:
        return 0
    names = set(map(str, required)) if isinstance(required, list) else set()
    most = count = 0
    for name in properties:
        count = 0 if name in names else count + 1
        most = max(most, count)
    return most


# Where a schema stands: its parent's place and what leads on from there. Written out only for an
# error: the names of a schema's parents, repeated for each of its thousands of properties, would
# take gigabytes.
Place = tuple["Place", str] | None


def _subschemas(node: dict[str, Any], place: Place) -> Iterator[tuple[Any, Place]]:
    for word in MAPS:
        if isinstance(node.get(word), dict):
            within = (place, f".{word}.")
            yield from ((value, (within, name)) for name, value in node[word].items())
    for word in LISTS:
        if isinstance(node.get(word), list):
            yield from ((value, (place, f".{word}[{i}]")) for i, value in enumerate(node[word]))
    for word in SINGLE:
        if word in node and not isinstance(node[word], list):
            yield node[word], (place, f".{word}")


def _path(place: Place) -> str:
    parts = []
    while place is not None:
        place, part = place
        parts.append(part)
    return "".join(reversed(parts))


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:40]} …"


def _why_not(word: str) -> str:
    if word == "nullable":
        return 'keyword \'nullable\' is OpenAPI\'s; write "type": ["…", "null"]'
    if word in UNSUPPORTED:
        return f"keyword {word!r} cannot be enforced; leave it out, and check it yourself"
    near = difflib.get_close_matches(word, ENFORCED, n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    return f"{word!r} is no keyword of JSON Schema{hint}"
