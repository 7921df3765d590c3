"""What is refused before anything is compiled, and that it says where."""

from __future__ import annotations

import json
import random
import re
import time
import tracemalloc
from typing import Any

import pytest

from octavo.grammar.compile import MOST_BYTES, grammar_text
from octavo.grammar.keywords import MOST_OPTIONAL, check_keywords
from octavo.types import InvalidRequest, StructuredOutputsParams
from tests.grammar import walks
from tests.grammar.walks import SPECIAL, TOKENS, allowed, compiler, text_of, walk

LARK = ("root ::= [0-9]+", '{"grammars": []}')


def problem(**constraint: Any) -> str:
    with pytest.raises(InvalidRequest) as caught:
        text_of(StructuredOutputsParams(**constraint))
    assert caught.value.param is not None and caught.value.param.startswith("structured_outputs")
    assert caught.value.param in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"json": {}, "regex": "a"},
        {"json_object": False},
        {"json": 5},
        {"regex": b"a"},
        {"choice": []},
        {"choice": ["a", ""]},
        {"choice": ["a", 5]},
        {"grammar": ["a"]},
        {"structural_tag": 1},
        {"regex": "a", "after": ""},
        {"regex": "a", "whitespace_pattern": 7},
    ],
)
def test_exactly_one_constraint_of_its_type(values: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        StructuredOutputsParams(**values)
    named = [name for name in values if name not in ("regex", "json")] or list(values)
    assert caught.value.param == "structured_outputs" or any(
        caught.value.param == f"structured_outputs.{name}" for name in named
    )


@pytest.mark.parametrize(
    "schema, where",
    [
        ({"properties": {"foo": "bar"}}, ".properties.foo is 'bar'"),
        ({"items": [{}, {"anyOf": [3]}]}, ".items[1].anyOf[0] is 3"),
        ({"$defs": {"a": {"additionalProperties": 0}}}, ".$defs.a.additionalProperties is 0"),
        ({"minLenght": 3}, "did you mean minLength"),
        ({"properties": {"a": {"not": {}}}}, ".properties.a: keyword 'not' cannot be enforced"),
        ({"type": "string", "nullable": True}, "OpenAPI"),
        ({"uniqueItems": True}, "'uniqueItems' cannot be enforced"),
        ({"x-guidance": {"lenient": True}}, "x-guidance"),
        ("{", "not JSON"),
        ("[]", "not an object"),
        ('{"type": "object"', "not JSON"),
        ("[" * 100_000, "structured_outputs.json"),
        ("\ud800", "surrogate"),
        ({"description": "x" * MOST_BYTES}, f"at most {MOST_BYTES:,}"),
    ],
)
def test_a_schema_is_refused_naming_the_place(schema: Any, where: str) -> None:
    assert where in problem(json=schema)


@pytest.mark.parametrize(
    "keyword, value",
    [
        ("$schema", "https://json-schema.org/draft/2020-12/schema"),
        ("title", "T"), ("description", "D"), ("default", 1), ("examples", [1]),
        ("uniqueItems", False), ("nullable", False), ("deprecated", True), ("x-order", 3),
        ("$comment", "c"), ("readOnly", True),
    ],
)  # fmt: skip
def test_what_says_nothing_about_values_is_passed_over(keyword: str, value: Any) -> None:
    text = text_of(StructuredOutputsParams(json={"type": "integer", keyword: value}))
    assert compiler().problem(text) == ""


@pytest.mark.parametrize(
    "schema, says",
    [
        ({"type": "strnig"}, "strnig"),
        ({"type": "string", "pattern": "([a-z"}, "unclosed"),
        ({"type": "string", "pattern": "(?=a)b"}, "look-around"),
        ({"type": "string", "format": "postcode"}, "postcode"),
        ({"$ref": "#/$defs/x"}, "/$defs/x"),
        ({"$ref": "http://example.com/s"}, "example.com"),
        ({"oneOf": [{}, {}]}, "oneOf"),
        ({"type": "integer", "minimum": 5, "maximum": 3}, "5"),
        ({"type": "object", "required": "a"}, "required"),
        ({"enum": []}, ""),
    ],
)
def test_what_cannot_be_followed_does_not_compile(schema: Any, says: str) -> None:
    found = compiler().problem(text_of(StructuredOutputsParams(json=schema)))
    assert found and says in found


@pytest.mark.parametrize("grammar", LARK)
def test_other_notations_of_grammars_are_refused(grammar: str) -> None:
    assert "Lark" in problem(grammar=grammar)


def test_a_schema_inside_a_grammar_is_checked_as_well() -> None:
    assert "minLenght" in problem(grammar='start: "x" %json {"minLenght": 1}')
    lenient = 'start: %json {"oneOf": [{}, {}], "x-guidance": {"lenient": true}}'
    assert "x-guidance" in problem(grammar=lenient)


@pytest.mark.parametrize(
    "constraint, says",
    [
        ({"regex": "([a-z"}, "unclosed"),
        ({"regex": "a{5,2}"}, "repetition"),
        ({"regex": r"a\b"}, "lookarounds"),
        ({"regex": "(a*)?"}, ""),
        ({"regex": "()"}, "only the empty text"),
        ({"grammar": "start: foo"}, "foo"),
        ({"grammar": "start: <|nope|>"}, "nope"),
        ({"grammar": "begin: /a/"}, "start"),
        ({"grammar": "start: A\nA: /a/ & /b/"}, "nothing matches"),
        ({"json_object": True, "whitespace_pattern": "("}, "unclosed"),
    ],
)
def test_the_compiler_says_what_is_wrong(constraint: dict[str, Any], says: str) -> None:
    found = compiler().problem(text_of(StructuredOutputsParams(**constraint)))
    assert says in found and bool(found) == bool(says)


# ---- structural tags ----


def tag(begin: str, content: Any, end: Any) -> dict[str, Any]:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def regex(pattern: str) -> dict[str, Any]:
    return {"type": "regex", "pattern": pattern}


OLDER = {
    "type": "structural_tag",
    "structures": [
        {"begin": "<f=a>", "schema": {"type": "boolean"}, "end": "</f>"},
        {"begin": "<f=b>", "schema": {"enum": [1, "x"]}, "end": "</f>"},
    ],
    "triggers": ["<f="],
}
TEXT = {"type": "any_text"}
ONE = {"triggers": ["<t>"], "tags": [tag("<t>", regex("[0-9]+"), "</t>")]}
# A format, texts that follow it to their end, and texts that do not.
FORMATS: dict[str, tuple[dict[str, Any], list[str], list[str]]] = {
    "older": (
        OLDER,
        ["", "hi", "hi <f=a>true</f> and <f=b>1</f>\n", "<f nothing"],
        ["<f=c>", "<f=a>1</f>", "<f=b>tru", "<f=a>true</f><f=d"],
    ),
    "const": ({"type": "const_string", "value": 'ab\n"c'}, ['ab\n"c'], ["abc", "x"]),
    "thought": (
        {"type": "sequence", "elements": [tag("<e>", TEXT, "</e>"), regex("[0-9]{2}")]},
        ["<e></e>12", "<e>a < b </e </e>34"],
        ["12", "<e></e>a"],
    ),
    "or": (
        {"type": "or", "elements": [regex("a+"), {"type": "json_schema", "json_schema": True}]},
        ["aaa", "[1]", "null"],
        ["ab", "nul!"],
    ),
    "triggered": (
        {"type": "triggered_tags", **ONE},
        ["", "x", "x<t>1</t>y<t>22</t>z"],
        ["<t>x", "x<t>1</u>"],
    ),
    "one": (
        {"type": "triggered_tags", "at_least_one": True, "stop_after_first": True, **ONE},
        ["x<t>12</t>", "<t>1</t>"],
        ["<t></t>"],
    ),
    "special": (
        {
            "type": "triggered_tags",
            "triggers": ["<|im_start|>"],
            "tags": [tag("<|im_start|>call ", regex("[0-9]"), "<s>")],
        },
        ["", "hi", "hi<|im_start|>call 1<s> bye"],
        ["<|im_start|>x", "<|im_start|>call 1 "],
    ),
    "separated": (
        {
            "type": "tags_with_separator",
            "tags": [tag("[", regex("[0-9]+"), "]"), tag("(", regex("[a-z]"), [")", "}"])],
            "separator": ", ",
            "at_least_one": True,
        },
        ["[12]", "[12], (a)", "(b}, (c), [1]"],
        ["[12],(", "12", "(ab"],
    ),
}


def ids_of(text: str) -> list[int]:
    ids = []
    while text:
        named = next((name for name in SPECIAL if text.startswith(name)), None)
        part = named or text[0]
        ids += [SPECIAL[named]] if named else [TOKENS.index(bytes([b])) for b in part.encode()]
        text = text[len(part) :]
    return ids


@pytest.mark.parametrize("name", FORMATS)
def test_a_structural_tag_takes_its_texts_and_no_others(name: str) -> None:
    form, good, bad = FORMATS[name]
    whole = form if name == "older" else {"type": "structural_tag", "format": form}
    given = json.dumps(whole) if name == "const" else whole
    params = StructuredOutputsParams(structural_tag=given)
    assert compiler().problem(text_of(params)) == ""
    for text in good:
        found = walks.matcher(params, output_ids=ids_of(text))
        assert not found.failure, text
        if not found.ended:
            assert set(walks.EOS) <= set(allowed(found) or []), text
    for text in bad:
        assert walks.matcher(params, output_ids=ids_of(text)).failure, text
    rng = random.Random(name)
    for _ in range(5):
        walk(walks.matcher(params), rng, most=60)


@pytest.mark.parametrize(
    "given, where",
    [
        ({"type": "x"}, ".type is 'x'"),
        ({"type": "structural_tag"}, ".structures must be a list"),
        ({**OLDER, "triggers": ["<g"]}, ".tags[0] begins with '<f=a>'"),
        ({**OLDER, "triggers": ["<g"] * 1001}, ".triggers has 1,001 entries; at most 1,000"),
        ({**OLDER, "format": TEXT}, ".format and structures"),
        ({"type": "structural_tag", "format": {"type": "grammar"}}, "format.type is 'grammar'"),
        ({"type": "structural_tag", "format": {"type": {}}}, "format.type is {}"),
        (
            '{"type": "structural_tag", "format": '
            + '{"type": "tag", "begin": "a", "end": "b", "content": ' * 800
            + "1"
            + "}" * 801,
            "nested too deeply",
        ),
        ({"type": "structural_tag", "format": tag("a", TEXT, "")}, ".end is empty"),
        (
            {"type": "structural_tag", "format": {"type": "sequence", "elements": [TEXT, TEXT]}},
            ".elements[0] any_text must",
        ),
        (
            {
                "type": "structural_tag",
                "format": {"type": "json_schema", "json_schema": {"minimun": 1}},
            },
            "did you mean minimum",
        ),
        ("{", "not JSON"),
    ],
)
def test_a_structural_tag_is_refused_naming_the_place(given: Any, where: str) -> None:
    assert where in problem(structural_tag=given)


def test_a_text_of_nothing_but_special_tokens_takes_time_linear_in_its_length() -> None:
    """A quarter of a MiB of names: the search for each among all that is left takes minutes."""
    special = {f"<|name_{i}|>": i for i in range(200)} | {"<|name_1": 900}
    value = "".join(f"<|name_{i % 200}|>" for i in range(20_000)) + "<|name_1x"
    tag = {"type": "structural_tag", "format": {"type": "const_string", "value": value}}
    began = time.process_time()
    text = grammar_text(StructuredOutputsParams(structural_tag=tag), special)
    assert time.process_time() - began < 5
    found = re.findall(r"<\[(\d+)\]>", text)  # the longest name counts, where one begins another
    assert [int(index) for index in found] == [*(i % 200 for i in range(20_000)), 900]
    assert json.loads(text)["grammars"][1]["lark_grammar"].endswith('<[900]> "x"')


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_a_number_that_json_has_not_is_refused_not_replaced_by_null(number: float) -> None:
    schema = {"properties": {"a": {"const": number}}}
    assert "NaN, or larger" in problem(json=schema)
    form = {"type": "json_schema", "json_schema": schema}
    assert "NaN, or larger" in problem(structural_tag={"type": "structural_tag", "format": form})
    assert "is not JSON" in problem(json=json.dumps(schema))
    assert "NaN, or larger" in problem(grammar=f"start: %json {json.dumps(schema)}")


def test_a_number_of_more_digits_than_python_reads_is_refused_by_the_compiler() -> None:
    lark = 'start: %json {"const": 1' + "0" * 5000 + "}"
    text = text_of(StructuredOutputsParams(grammar=lark))
    assert "out of range" in compiler().problem(text)


def test_half_a_surrogate_in_a_schema_inside_of_a_grammar_is_refused() -> None:
    assert "half a surrogate" in problem(grammar=r'start: %json {"const": "\ud800"}')


def test_long_names_of_parents_are_not_repeated_for_each_property() -> None:
    """A name of 100 KB with 9,000 properties below it took 900 MB."""
    inner: dict[str, Any] = {f"b{i}": {} for i in range(9000)}
    schema = {"properties": {"a" * 100_000: {"properties": inner, "required": list(inner)}}}
    tracemalloc.start()
    try:
        check_keywords(schema, "json")
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()
    inner["b7"] = {"anyOf": [{}, {"minLenght": 1}]}
    with pytest.raises(InvalidRequest, match=r"json\.properties\.a+\.properties\.b7\.anyOf\[1\]: "):
        check_keywords(schema, "json")


def test_as_many_optional_properties_as_can_be_followed_are_taken() -> None:
    names = [f"field_{i}" for i in range(2 * MOST_OPTIONAL)]
    every = {name: {"type": "string"} for name in names}
    few = dict(list(every.items())[:MOST_OPTIONAL])
    for schema in (
        {"properties": few},
        {"properties": few, "additionalProperties": False},
        {"properties": every, "required": names[MOST_OPTIONAL - 1 : MOST_OPTIONAL]},
    ):
        text = text_of(StructuredOutputsParams(json={"type": "object", **schema}))
        found = compiler().compile(text)
        for byte in b'{"field_1": "a", "field_7": "b", "field_':
            assert found.consume_token(TOKENS.index(bytes([byte]))), found.get_error()
            found.compute_bitmask()
            assert not found.is_error(), found.get_error()
    within = {"properties": {"a": {"type": "object", "properties": every}}}
    assert problem(json=within) == (
        f"structured_outputs.json.properties.a: {2 * MOST_OPTIONAL} properties in a row are "
        f"optional, at most {MOST_OPTIONAL} can be followed; require some, or put them into "
        "objects of their own"
    )
