"""Matchers allow what the constraint allows and nothing else, however they were brought there."""

from __future__ import annotations

import json
import math
import random
import re
from typing import Any

import jsonschema_rs
import numpy as np
import pytest

from octavo.grammar import grammars as grammars_module
from octavo.grammar.grammars import Grammars
from octavo.grammar.matcher import Matcher, compute_together
from octavo.grammar.vocabulary import Vocabulary
from octavo.types import StructuredOutputsParams
from tests.grammar import walks
from tests.grammar.schemas import random_schema
from tests.grammar.walks import EOS, TOKENS, allowed, walk

DRAFT = {"$schema": "https://json-schema.org/draft/2020-12/schema"}


def has_huge_number(value: Any) -> bool:
    """A number beyond floats (1E999): JSON, and yet no number to Python."""
    if isinstance(value, dict):
        return any(map(has_huge_number, value.values()))
    if isinstance(value, list):
        return any(map(has_huge_number, value))
    return isinstance(value, float) and not math.isfinite(value)


@pytest.mark.parametrize("start", range(0, 120, 30))
def test_what_follows_a_random_schema_validates(start: int) -> None:
    num_whole = 0
    for seed in range(start, start + 30):
        rng = random.Random(seed)
        schema = random_schema(rng)
        validator = jsonschema_rs.validator_for({**DRAFT, **schema}, validate_formats=True)
        for _ in range(3):
            out = walk(walks.matcher(StructuredOutputsParams(json=schema)), rng)
            if out is not None:
                value = json.loads(out.decode())
                assert has_huge_number(value) or validator.is_valid(value), (seed, out)
                num_whole += 1
    assert num_whole > 60


REGEXES = (
    *("[a-c]{2,5}", r"\d{3}-\d{2}", "(foo|bar)+", r"a/b\n?", "x.{0,4}y", "é{1,3}", "(?i)yes|no"),
    *(r"[\d\s]{1,9}", r"\w+@\w+\.com", "a?b?c?d", r"\x41[\x42-\x44]*", "(ab|a)(bc|c)", r"\\/"),
    *(r"\D\W\S", r"[^\w]{2}", r"[\]\-a]{1,3}"),
)


@pytest.mark.parametrize("regex", REGEXES)
def test_what_follows_a_regex_matches_it(regex: str) -> None:
    rng = random.Random(regex)
    outs = [walk(walks.matcher(StructuredOutputsParams(regex=regex)), rng) for _ in range(10)]
    whole = [out.decode() for out in outs if out is not None]
    assert len(whole) >= 5
    flags = 0 if "(?i)" in regex else re.ASCII
    for text in whole:
        assert re.fullmatch(regex, text, flags), text


def test_every_choice_can_be_made_and_nothing_else() -> None:
    choice = ["yes", 'no "q"', "back\\slash", "new\nline", "tab\t", "é 😀", "/s/", "\x01", "\x7f",
              "a{1}[x]*", " lead", "yesterday", "\u2028"]  # fmt: skip
    rng, met = random.Random(0), set()
    for _ in range(200):
        out = walk(walks.matcher(StructuredOutputsParams(choice=choice)), rng)
        assert out is not None
        met.add(out.decode())
    assert met == set(choice)


def test_white_space_is_bounded_by_default_and_as_asked() -> None:
    schema = {"type": "array", "items": {"type": "integer"}}
    rng = random.Random(1)
    for options, pattern in (
        ({}, r"([ \t]{1,2}|\r?\n[ \t]{0,40})?"),
        ({"disable_any_whitespace": True}, ""),
        ({"whitespace_pattern": " {1,3}"}, "( {1,3})?"),
    ):
        params = StructuredOutputsParams(json=schema, **options)
        inline = StructuredOutputsParams(grammar=f"start: %json {json.dumps(schema)}", **options)
        for index in range(40):
            out = walk(walks.matcher(inline if index % 2 else params), rng)
            shape = rf"\[{pattern}(-?\d+{pattern}(,{pattern}-?\d+{pattern})*)?\]"
            assert out is None or re.fullmatch(shape, out.decode()), out


CONSTRAINTS = (
    StructuredOutputsParams(json_object=True),
    StructuredOutputsParams(regex="(ab|a)*c{2,9}"),
    StructuredOutputsParams(json=random_schema(random.Random(4))),
    StructuredOutputsParams(grammar='start: "(" start ")" | /[a-z]+/ start?'),
    StructuredOutputsParams(regex="[a-z]{2,9}", after="</"),
)


@pytest.mark.parametrize("params", CONSTRAINTS, ids=lambda params: params.kind)
def test_an_id_is_allowed_exactly_where_it_can_be_consumed(params: StructuredOutputsParams) -> None:
    rng = random.Random(3)
    found, ids = walks.matcher(params), []
    for _ in range(12):
        may = allowed(found)
        if may is None:
            break
        others = [token for token in range(len(TOKENS)) if token not in may]
        few = [*rng.sample(may, min(len(may), 20)), *rng.sample(others, min(len(others), 20))]
        for token in few:
            other = walks.matcher(params, output_ids=[*ids, token])
            assert (token in may) == (not other.failure), TOKENS[token]
        ids.append(rng.choice(may))
        found.consume(ids[-1])


def test_masks_made_together_are_those_made_alone() -> None:
    rng = random.Random(6)
    pairs = []
    for params in CONSTRAINTS * 3:
        ids: list[int] = []
        found = walks.matcher(params)
        for _ in range(rng.randint(0, 9)):
            may = allowed(found)
            if may is None:
                break
            ids.append(rng.choice(may))
            found.consume(ids[-1])
        pairs.append((found, walks.matcher(params, output_ids=ids)))
    compute_together([found for found, _ in pairs])
    for found, alone in pairs:
        assert allowed(found) == allowed(alone)


def test_eos_comes_where_the_output_is_complete_and_ends_it() -> None:
    found = walks.matcher(StructuredOutputsParams(regex="ab*"))
    first = allowed(found)
    assert first is not None and not set(EOS) & set(first)
    found.consume(TOKENS.index(b"a"))
    assert set(EOS) <= set(allowed(found) or [])
    found.consume(EOS[1])
    assert found.ended and not found.failure and allowed(found) is None
    ignoring = walks.matcher(StructuredOutputsParams(regex="ab*"), ignore_eos=True)
    ignoring.consume(TOKENS.index(b"a"))
    assert [TOKENS[i] for i in allowed(ignoring) or []] == [b"b"]


def test_an_eos_that_is_not_special_is_no_text_and_may_be_named() -> None:
    grammars = Grammars()
    grammars.set_vocabulary(Vocabulary([b"a", b"b", b"ab", b"<e>"], [], [3]))
    text = walks.text_of(StructuredOutputsParams(regex="a[<>eb]{2,5}"))
    found = grammars.matcher(text, [0])
    mask = np.zeros(1, dtype=np.int32)
    assert found.fill(mask) and mask[0] == 0b0010  # b alone; neither ab nor the text of EOS
    named = walks.text_of(StructuredOutputsParams(grammar='start: "a" <e>'))
    found = grammars.matcher(named, [0])
    assert found.fill(mask) and mask[0] == 0b1000
    found.consume(3)
    assert found.ended and not found.failure
    more = walks.text_of(StructuredOutputsParams(grammar='start: "a" <e> "b"'))
    assert "before the grammar" in grammars.matcher(more, [0, 3]).failure


def test_special_tokens_match_no_text_and_are_matched_by_name() -> None:
    name = walks.TOKENS[2].decode()
    found = walks.matcher(StructuredOutputsParams(regex=re.escape(name)))
    assert 2 not in (allowed(found) or [])
    found = walks.matcher(StructuredOutputsParams(grammar=f'start: {name} "x"'))
    assert allowed(found) == [2]


def test_a_token_that_may_not_come_fails_and_stays_failed() -> None:
    found = walks.matcher(StructuredOutputsParams(regex="ab"))
    found.consume(TOKENS.index(b"z"))
    assert "cannot be followed" in found.failure
    assert allowed(found) is None
    found.consume(TOKENS.index(b"a"))
    assert "cannot be followed" in found.failure and not found.ended
    early = walks.matcher(StructuredOutputsParams(regex="ab"))
    early.consume(EOS[0])
    assert "before the grammar was complete" in early.failure


def test_no_allowed_id_that_fits_is_a_failure() -> None:
    found = walks.matcher(StructuredOutputsParams(regex="ab"), allowed_ids=[TOKENS.index(b"z")])
    assert allowed(found) is None
    assert "allowed_token_ids" in found.failure


HUNGRY = StructuredOutputsParams(regex=r"(\p{L}{1,50} ?){1,100}")  # overflows its lexer soon


def run_until_failure(found: Matcher) -> str:
    rng = random.Random(0)
    for _ in range(200):
        may = allowed(found)
        if may is None:
            break
        found.consume(rng.choice(may))
    return found.failure


def test_one_whose_lexer_overflows_fails_alone() -> None:
    """Copies of a compiled grammar share a lexer: when it gives up, the others get their own."""
    grammars = Grammars()
    grammars.set_vocabulary(walks.VOCABULARY)
    text = walks.text_of(HUNGRY)
    grammars.prepare(text)
    while not grammars.ready(text):
        grammars.prepared.wait(0.05)
    first, neighbour = grammars.matcher(text), grammars.matcher(text)
    neighbour.consume(TOKENS.index(b"a"))
    assert "cannot be followed" in run_until_failure(first)
    assert allowed(neighbour) is not None and not neighbour.failure
    later = grammars.matcher(text)
    assert allowed(later) is not None and not later.failure
    grammars.close()


def test_what_is_slow_to_compile_is_not_compiled_in_a_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(grammars_module, "SWIFT_SECONDS", -1.0)
    grammars = Grammars()
    grammars.set_vocabulary(walks.VOCABULARY)
    text = walks.text_of(HUNGRY)
    grammars.prepare(text)
    while not grammars.ready(text):
        grammars.prepared.wait(0.05)
    compiled = grammars._entries[text].compiled
    assert "send the request again" in run_until_failure(grammars.matcher(text))
    for _ in range(200):  # later requests find a new one
        if grammars._entries[text].compiled is not compiled:
            break
        grammars.prepared.clear()
        grammars.prepared.wait(0.05)
    later = grammars.matcher(text)
    assert allowed(later) is not None and not later.failure
    grammars.close()


# ---- the gate ----


def test_a_grammar_waits_for_its_marker() -> None:
    """Wherever the tokens of the marker are cut."""
    params = StructuredOutputsParams(choice=["yes", "no"], after="</e>")
    rng, whole = random.Random(7), 0
    for _ in range(60):
        found, out = walks.matcher(params), b""
        for _ in range(300):
            may = allowed(found)
            if may is None:
                break
            # Bytes of the marker are likely, or it would never come.
            likely = [i for i in may if TOKENS[i] in (b"<", b"/", b"e", b">", b"</")]
            token = rng.choice(likely if likely and rng.random() < 0.8 else may)
            found.consume(token)
            out += TOKENS[token]
        assert not found.failure
        if found.ended:
            assert out.partition(b"</e>")[2] in (b"yes", b"no"), out
            whole += 1
    assert whole > 20


def test_before_the_marker_nothing_ends_the_output_or_runs_past_it() -> None:
    found = walks.matcher(StructuredOutputsParams(choice=["yes"], after=">"))
    may = allowed(found)
    assert may is not None and not set(EOS) & set(may)
    assert TOKENS.index(b">\n") not in may and TOKENS.index(b">") in may
    assert len(may) == len(TOKENS) - len(EOS) - 1
    found.consume(TOKENS.index(b">"))
    assert {TOKENS[i][:1] for i in allowed(found) or []} == {b"y"}
    ended = walks.matcher(StructuredOutputsParams(choice=["yes"], after=">"))
    ended.consume(EOS[0])
    assert "before its constrained part" in ended.failure


def test_a_marker_that_overlaps_itself_is_found() -> None:
    vocabulary = Vocabulary([b"a", b"b", b"ab", b"aab", b"c"], [], [])
    grammars = Grammars()
    grammars.set_vocabulary(vocabulary)
    text = walks.text_of(StructuredOutputsParams(regex="c"))
    for ids in ([0, 0, 0, 1], [0, 3], [2, 0, 3], [0, 0, 2]):
        found = grammars.matcher(text, ids, after="aab")
        assert not found.failure and not found.ended
        found.consume(4)
        assert found.ended, ids
