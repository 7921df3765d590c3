"""T23: speculation changes nothing, seen from outside, and what it did is told."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cases.asking import CHAT, COMPLETIONS, post, question, whole
from tests.cases.conftest import alive
from tests.fixtures import server
from tests.fixtures.server import Server

FLAGS = ("--dtype", "float32", "--kv-cache-memory-bytes", "16MiB", "--num-speculative-tokens", "4")
SHAPE = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "ok": {"type": "boolean"}},
    "required": ["name", "ok"],
    "additionalProperties": False,
}
RANDOM, REPEATED = [0, *range(40, 70)], [0, *[60, 61, 62, 63, 64] * 6]
# Where the model's own guesses are all right.
ALIKE: list[dict[str, Any]] = [
    {"prompt": RANDOM, "logprobs": 3},
    {"prompt": REPEATED, "logprobs": 0},
    {"prompt": RANDOM, "temperature": 0.9, "top_p": 0.9, "seed": 5},
    {"prompt": REPEATED, "logit_bias": {"101": 3.0, "102": 3.0}, "temperature": 0.7, "seed": 6},
]
OTHERS: list[dict[str, Any]] = [
    {"prompt": REPEATED, "frequency_penalty": 1.0, "logprobs": 2},
    {"prompt": RANDOM, "repetition_penalty": 1.3, "presence_penalty": 0.4, "seed": 7},
    {"prompt": RANDOM, "guided_json": SHAPE, "logprobs": 1},
    {"prompt": REPEATED, "allowed_token_ids": [101, 102, 103], "stop": ["cc"], "logprobs": 0},
    {"prompt": RANDOM, "temperature": 1.0, "n": 3, "seed": 8},
]


@pytest.fixture(scope="module")
def guessing_server(model_r: Path) -> Iterator[Server]:
    with server.start(model_r, *FLAGS, "--speculative-model", str(model_r)) as running:
        yield running


@pytest.fixture
def guessing(guessing_server: Server) -> Iterator[Server]:
    yield from alive(guessing_server)


def same(one: Server, other: Server, body: dict[str, Any]) -> dict[str, Any]:
    """Asserts that both answer alike; the first one's answer."""
    body = {"temperature": 0, "max_tokens": 40, "return_token_ids": True, **body}
    found, expected = (post(each, COMPLETIONS, **body) for each in (one, other))
    assert found["usage"] == expected["usage"]
    for mine, theirs in zip(found["choices"], expected["choices"], strict=True):
        mine_logprobs, their_logprobs = mine.pop("logprobs", None), theirs.pop("logprobs", None)
        assert mine == theirs
        assert (mine_logprobs is None) == (their_logprobs is None)
        if mine_logprobs is not None:
            values = mine_logprobs["token_logprobs"]
            assert values == pytest.approx(their_logprobs["token_logprobs"], abs=1e-3)
            assert 0.0 not in values or 0.0 in their_logprobs["token_logprobs"]
    return found


def drafts(running: Server) -> dict[str, float]:
    found = running.metrics()
    return {name: value for name, value in found.items() if "spec_decode" in name}


def test_speculation_changes_nothing(guessing: Server, random_model: Server) -> None:
    """T23: with the model as its own draft, all guesses are right."""
    told = {"draft_tokens": 0, "accepted_draft_tokens": 0}
    before = drafts(guessing)
    for body in ALIKE:
        timings = same(guessing, random_model, body)["timings"]
        for name in told:
            told[name] += timings.get(name, 0)
    after = drafts(guessing)
    counted = {name: after[name] - before[name] for name in after}
    guesses = counted["vllm:spec_decode_num_draft_tokens_total"]
    assert guesses == counted["vllm:spec_decode_num_accepted_tokens_total"] > 0
    assert told == {"draft_tokens": guesses, "accepted_draft_tokens": guesses}
    assert 0 < counted["vllm:spec_decode_num_drafts_total"] <= guesses
    assert counted["vllm:spec_decode_num_accepted_tokens_per_pos_total"] == guesses
    assert counted["octavo_spec_decode_num_draft_tokens_per_pos_total"] == guesses
    for body in OTHERS:
        same(guessing, random_model, body)


def test_speculation_changes_no_stream(guessing: Server, random_model: Server) -> None:
    """T23: text comes as a whole answer's does, on both routes."""
    for route in (COMPLETIONS, CHAT):
        body = question(route, "hello hello hello", max_tokens=30, stop=["th"])
        events = guessing.events(route, **body)
        parts = [choice for event in events for choice in event["choices"]]
        text = "".join(
            part["text"] if route == COMPLETIONS else part["delta"].get("content") or ""
            for part in parts
        )
        (expected,), _ = whole(random_model, route, **body)
        assert (text, parts[-1]["finish_reason"]) == (expected.text, expected.finish_reason)
