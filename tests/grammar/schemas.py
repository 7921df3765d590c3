"""Random JSON schemas of all that is enforced."""

from __future__ import annotations

import random
from typing import Any

Schema = dict[str, Any]
PATTERNS = (
    *("^[a-z]{2,4}$", "[0-9]+", "^a|b$", r"^\d{3}-\d{2}$", "^(foo|bar)baz?$", r"x\.y"),
    *('^[^"\\\\]*$', r"^\w+$", "é+", r"^hello there indeed\!$"),
)
# Not of times: RFC 3339 has second 60 only where a leap second was.
FORMATS = ("date", "uuid", "ipv4", "ipv6", "email", "hostname", "uri")
VALUES = (1, "a", None, True, {"x": [1]}, 'é\n"', 2.5, [], "b/c", "\\", "\x01", {"y": {"z": []}})
NAMES = ("a", "b", "long name", 'é"q', "c", "d")


def random_schema(rng: random.Random, depth: int = 3) -> Schema:
    simple = (_string, _integer, _number, _plain, _enum)
    nested = (_object, _array, _map, _tuple, _any_of)
    return rng.choice(simple + nested if depth else simple)(rng, depth)


def _string(rng: random.Random, depth: int) -> Schema:
    least = rng.randint(0, 4)
    more: list[Schema] = [
        {},
        {"pattern": rng.choice(PATTERNS)},
        {"minLength": least, "maxLength": least + rng.randint(0, 6)},
        {"format": rng.choice(FORMATS)},
        {"pattern": "^[a-f]+$", "maxLength": 5},
    ]
    return {"type": "string", **rng.choice(more)}


def _integer(rng: random.Random, depth: int) -> Schema:
    low = rng.randint(-200, 100)
    more: list[Schema] = [
        {},
        {"minimum": low, "maximum": low + rng.randint(0, 300)},
        {"exclusiveMinimum": rng.randint(-5, 5)},
        {"multipleOf": rng.choice((2, 3, 7, 10)), "minimum": -50, "maximum": 1000},
    ]
    return {"type": "integer", **rng.choice(more)}


def _number(rng: random.Random, depth: int) -> Schema:
    low = rng.uniform(-5, 5)
    more: list[Schema] = [
        {},
        {"minimum": low, "maximum": low + rng.uniform(0.1, 9)},
        {"exclusiveMaximum": rng.choice((1.5, -2, 0, 100))},
        {"multipleOf": rng.choice((0.5, 0.25)), "minimum": 0, "maximum": 50},
    ]
    return {"type": "number", **rng.choice(more)}


def _plain(rng: random.Random, depth: int) -> Schema:
    return {"type": rng.choice(["boolean", "null", ["integer", "null"]])}


def _enum(rng: random.Random, depth: int) -> Schema:
    found = rng.sample(VALUES, rng.randint(1, 4))
    return {"const": found[0]} if len(found) == 1 else {"enum": found}


def _object(rng: random.Random, depth: int) -> Schema:
    names = rng.sample(NAMES, rng.randint(0, 4))
    schema: Schema = {
        "type": "object",
        "properties": {name: random_schema(rng, depth - 1) for name in names},
        "required": [name for name in names if rng.random() < 0.6],
    }
    if rng.random() < 0.6:
        schema["additionalProperties"] = rng.choice([False, random_schema(rng, depth - 1)])
    if rng.random() < 0.2:
        schema["patternProperties"] = {"^x_": random_schema(rng, depth - 1)}
    return schema


def _array(rng: random.Random, depth: int) -> Schema:
    least = rng.randint(0, 3)
    bounds = {"minItems": least, "maxItems": least + rng.randint(0, 3)}
    own = bounds if rng.random() < 0.5 else {}
    return {"type": "array", "items": random_schema(rng, depth - 1), **own}


def _map(rng: random.Random, depth: int) -> Schema:
    return {"type": "object", "additionalProperties": random_schema(rng, depth - 1)}


def _tuple(rng: random.Random, depth: int) -> Schema:
    first = [random_schema(rng, depth - 1) for _ in range(rng.randint(1, 3))]
    rest = rng.choice([False, random_schema(rng, depth - 1)])
    return {"type": "array", "prefixItems": first, "items": rest}


def _any_of(rng: random.Random, depth: int) -> Schema:
    return {"anyOf": [random_schema(rng, depth - 1) for _ in range(rng.randint(1, 3))]}
