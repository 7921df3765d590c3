"""Constraints that are wrong, too large or easy to drop, on a real engine."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest

from tests.cases.asking import CHAT, COMPLETIONS, post, question, same_both_ways
from tests.fixtures import server
from tests.fixtures.server import Server
from tests.fixtures.waiting import least

# Alone, all of these stay below 0.1 s. A machine that runs other things pauses everybody, but not
# each time: the least of a few tries counts.
PAUSE = 0.5
NODE = {
    "type": "object",
    "properties": {"value": {"type": "integer"}, "next": {"anyOf": [{"$ref": "#/$defs/node"},
                                                                     {"type": "null"}]}},
    "required": ["value", "next"],
    "additionalProperties": False,
}  # fmt: skip
RECURSIVE = {"$ref": "#/$defs/node", "$defs": {"node": NODE}}
# Name -> (constraint, what the refusal names).
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "property_is_a_text": ({"json": {"properties": {"foo": "bar"}}}, "properties.foo is 'bar'"),
    "open_class": ({"regex": "([a-z"}, "unclosed character class"),
    "five_megabytes": ({"json": {"description": "x" * 5_000_000}}, "at most 262,144"),
    "many_pattern_properties": ({"json": {"patternProperties": {f"^a{i}x": {} for i in
                                                                range(400)}}}, "simplify it"),
    "deep_rules": ({"grammar": "start: a0\n" + "".join(f"a{i}: a{i + 1}\n" for i in range(9000))
                    + 'a9000: "x"'}, "simplify it"),
    "crossing_regexes": ({"grammar": "start: A\nA: " + " & ".join(
        f"/.*a.{{{i}}}b.*/" for i in range(1, 21))}, ""),
    "keyword_that_is_not_enforced": ({"json": {"not": {"type": "string"}}}, "'not'"),
    "misspelt_keyword": ({"json": {"minLenght": 2}}, "did you mean minLength"),
    "unknown_format": ({"json": {"type": "string", "format": "postcode"}}, "postcode"),
    "reference_to_nothing": ({"json": {"$ref": "#/$defs/x"}}, "/$defs/x"),
}  # fmt: skip


@pytest.fixture(scope="module")
def busy(model_r: Path) -> Iterator[tuple[Server, subprocess.Popen[str]]]:
    """R, and a client of its own process that streams from it all the time."""
    with server.start(model_r, "--disable-uvicorn-access-log") as running:
        script = Path(__file__).parents[1] / "server/watch_stream.py"
        command = [sys.executable, str(script), "127.0.0.1", str(running.port), "300"]
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        assert process.stdout.readline().strip() == "streaming"
        yield running, process
        process.kill()
        process.communicate()


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_constraint_is_refused_at_once_and_by_name(random_model: Server, name: str):
    """T27, without neighbours: streamed or not, on both routes."""
    constraint, says = WRONG[name]
    kind = next(iter(constraint))
    for route in (COMPLETIONS, CHAT):
        for stream in (False, True):
            body = question(route, "x", structured_outputs=constraint, stream=stream)
            began = time.monotonic()
            answer = random_model.client.post(route, json=body)
            seconds = time.monotonic() - began
            assert answer.status_code == 400, answer.text[:300]
            error = answer.json()["error"]
            assert error["param"] == f"structured_outputs.{kind}"
            assert says in error["message"] and error["param"] in error["message"]
            print(f"{name}: {seconds:.2f} s")
            assert seconds < 30  # alone below 1; here others use the machine


def test_wrong_constraints_pause_no_stream(busy):
    """T27: the neighbour goes on while each of them is refused, and while good ones compile."""
    running, watcher = busy

    def pause() -> float:
        assert watcher.stdin is not None and watcher.stdout is not None
        print("tell", file=watcher.stdin, flush=True)
        return float(watcher.stdout.readline())

    good = {"json": {"properties": {f"p{i}": {"type": "string"} for i in range(300)}}}
    for name, (constraint, _) in [*WRONG.items(), ("good", (good, ""))]:

        def measure(number: int, name: str = name, constraint: Any = constraint) -> float:
            pause()
            body = {
                "prompt": "x",
                "max_tokens": 1,
                "structured_outputs": varied(constraint, number),
            }
            answer = running.client.post(COMPLETIONS, json=body)
            assert answer.status_code == (200 if name == "good" else 400)
            seconds = pause()
            print(f"{name}: pause {seconds * 1000:.0f} ms")
            return seconds

        assert least(measure, PAUSE) < PAUSE, name


def varied(constraint: dict[str, Any], number: int) -> dict[str, Any]:
    """As large and as wrong, but no verdict is remembered of it."""
    ((kind, value),) = constraint.items()
    if isinstance(value, dict):
        return {kind: {**value, "title": f"t{number}"}}
    return {kind: value + " " * number}


SCHEMAS: dict[str, dict[str, Any]] = {
    "recursive": RECURSIVE,
    "escaped_pattern": {"type": "string", "pattern": r"^hello there indeed\!$"},
    "escaped_backslash": {"type": "string", "pattern": r"^hello there indeed\\!$"},
    "any_object": {"type": "object"},
    "numbers": {"type": "array", "items": {"type": "number", "minimum": 0, "maximum": 2},
                "minItems": 2, "maxItems": 3},
}  # fmt: skip


@pytest.mark.parametrize("name", SCHEMAS)
def test_what_is_answered_validates_or_nothing_is(random_model: Server, name: str):
    """T28: an independent validator takes every finished answer, strict or not."""
    schema = SCHEMAS[name]
    num_whole = 0
    for route, strict in ((COMPLETIONS, {}), (CHAT, {"strict": True}), (CHAT, {"strict": False})):
        form = {"name": name, "schema": schema, **strict}
        given = {"response_format": {"type": "json_schema", "json_schema": form}}
        # Braces and quotes are likely, or a model that knows nothing would go on for ever.
        likely = {"97": 3, "64": 3, "6": 3, "38": 3}
        body = question(route, "x", n=4, temperature=1, seed=3, max_tokens=60,
                        logit_bias=likely, **given)  # fmt: skip
        choices, _ = same_both_ways(random_model, route, **body)
        for choice in choices:
            if choice.finish_reason == "stop":
                jsonschema_rs.validate(schema, json.loads(choice.text))
                num_whole += 1
            else:
                assert choice.finish_reason == "length"
    assert num_whole > 0


def test_logprobs_under_a_constraint_are_json_and_the_models_own(random_model: Server):
    """T20: what is banned has its raw log-probability, and minus infinity a number."""
    for constraint in ({"structured_outputs": {"choice": ["yes", "no"]}},
                       {"guided_regex": "[ab]{3}"}):  # fmt: skip
        body = question(CHAT, "hello", logprobs=True, top_logprobs=5, logit_bias={"40": -100})
        free = post(random_model, CHAT, max_tokens=1, **body)["choices"][0]
        bound = post(random_model, CHAT, max_tokens=9, **body, **constraint)["choices"][0]
        first, own = (choice["logprobs"]["content"][0] for choice in (free, bound))
        assert first["top_logprobs"] == own["top_logprobs"]  # of the same distribution
        assert own["logprob"] <= min(entry["logprob"] for entry in own["top_logprobs"]) or any(
            entry["token"] == own["token"] for entry in own["top_logprobs"]
        )
        joined = b"".join(bytes(e["bytes"]) for e in bound["logprobs"]["content"])
        assert joined.decode() == bound["message"]["content"]
        assert bound["finish_reason"] == "stop"
