"""``oneOf`` is followed where its options exclude each other, and refused where they may not."""

from __future__ import annotations

import json
import random
import time
from typing import Any

import jsonschema_rs
import pytest

from octavo.grammar.unions import with_plain_unions
from octavo.types import StructuredOutputsParams
from tests.grammar import walks


def kind(name: str, **more: Any) -> dict[str, Any]:
    """An option of a union as pydantic writes it."""
    properties = {"kind": {"const": name, "type": "string", "default": name}, **more}
    return {"type": "object", "properties": properties, "required": ["kind", *more],
            "additionalProperties": False}  # fmt: skip


CAT, DOG = kind("cat", lives={"enum": [7, 9]}), kind("dog", loud={"type": "boolean"})
REFERENCES = {
    "$defs": {"Cat": CAT, "Dog": DOG, "Same": {"$ref": "#/$defs/Dog"}},
    "type": "object",
    "properties": {
        "pet": {
            "discriminator": {"propertyName": "kind"},
            "oneOf": [{"$ref": "#/$defs/Cat"}, {"$ref": "#/$defs/Same"}],
        }
    },
    "required": ["pet"],
    "additionalProperties": False,
}
EXCLUSIVE: dict[str, dict[str, Any]] = {
    "references": REFERENCES,
    "in_place": {"oneOf": [CAT, DOG]},
    "types": {"oneOf": [{"type": "boolean"}, {"type": "integer", "maximum": 9, "minimum": 0}]},
    "beside_any_of": {"anyOf": [{"type": "integer"}, {"type": "string"}],
                      "oneOf": [{"enum": ["a"], "type": "string"},
                                {"type": "integer", "minimum": 3, "maximum": 5}]},
    "in_an_array": {"type": "array", "items": {"oneOf": [CAT, DOG]}, "minItems": 1, "maxItems": 2},
}  # fmt: skip
OPEN = {"additionalProperties": True}
OVERLAPPING: dict[str, dict[str, Any]] = {
    "anything": {"oneOf": [{}, {"type": "string"}]},
    "numbers": {"oneOf": [{"type": "number"}, {"type": "integer"}]},
    "same_constant": {"oneOf": [{**CAT, **OPEN}, {**kind("cat", loud={}), **OPEN}]},
    "not_required": {"oneOf": [{**CAT, **OPEN, "required": []},
                               {**DOG, **OPEN, "required": []}]},
    "no_such_reference": {"oneOf": [{"$ref": "#/$defs/x"}, {"type": "string"}], "$defs": {}},
    "circle": {"oneOf": [{"$ref": "#/$defs/a"}, {"type": "null"}],
               "$defs": {"a": {"$ref": "#/$defs/a"}}},
}  # fmt: skip


@pytest.mark.parametrize("name", EXCLUSIVE)
def test_options_that_exclude_each_other_are_followed(name: str) -> None:
    schema = EXCLUSIVE[name]
    before = json.dumps(schema)
    params = StructuredOutputsParams(json=schema)
    assert walks.compiler().problem(walks.text_of(params)) == ""
    assert json.dumps(schema) == before  # a client's own object stays as it is
    rng, num_whole = random.Random(name), 0
    for _ in range(12):
        out = walks.walk(walks.matcher(params), rng)
        if out is not None:
            jsonschema_rs.validate(schema, json.loads(out))
            num_whole += 1
    assert num_whole > 5


@pytest.mark.parametrize("name", OVERLAPPING)
def test_options_that_may_overlap_are_refused(name: str) -> None:
    params = StructuredOutputsParams(json=OVERLAPPING[name])
    problem = walks.compiler().problem(walks.text_of(params))
    assert problem
    if name not in ("no_such_reference", "circle"):
        assert "use anyOf" in problem


def test_values_are_not_taken_for_schemas() -> None:
    value = {"oneOf": [{"type": "string"}, {"type": "null"}]}
    schema = {"const": value, "default": value, "properties": {"oneOf": {"type": "null"}}}
    assert with_plain_unions(schema) == schema


def test_comparing_options_is_given_up_before_it_takes_long() -> None:
    """Found by CPU time: twenty unions of a hundred options of 200 properties took 4 s."""
    required = [f"r{j}" for j in range(200)]
    options = {
        f"x{i}": {"type": "object", "required": [*required, "kind"],
                  "properties": {"kind": {"const": str(i)}}}
        for i in range(100)
    }  # fmt: skip
    union = {"oneOf": [{"$ref": f"#/$defs/{name}"} for name in options]}
    before = time.thread_time()
    few = with_plain_unions({"$defs": options, "oneOf": union["oneOf"][:20]})
    assert "anyOf" in few
    many = with_plain_unions({"$defs": options, "anyOf": [union] * 20})
    assert time.thread_time() - before < 2
    assert "oneOf" in many["anyOf"][-1]  # which llguidance refuses
