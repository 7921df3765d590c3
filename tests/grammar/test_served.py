"""Structured output through HTTP, on a model of random weights: nothing but the grammar makes its
answers valid."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import httpx
import jsonschema_rs
import pytest

from tests.fixtures import models, server
from tests.fixtures.server import Server

CHAT = {"messages": [{"role": "user", "content": "hello"}]}
SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["a", "b"]}, "size": {"type": "integer", "maximum": 99}},
    "required": ["name", "size"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def running() -> Iterator[Server]:
    with server.start(models.path("R"), "--max-model-len", "512") as started:
        yield started


def ask(running: Server, route: str = "/v1/completions", **fields: Any) -> httpx.Response:
    body: dict[str, Any] = {"prompt": "hello"} if route == "/v1/completions" else dict(CHAT)
    return running.client.post(route, json={**body, "max_tokens": 100, **fields})


def texts(answer: httpx.Response) -> list[str]:
    assert answer.status_code == 200, answer.text
    choices = answer.json()["choices"]
    assert {choice["finish_reason"] for choice in choices} == {"stop"}, choices
    return [choice["text"] if "text" in choice else choice["message"]["content"]
            for choice in choices]  # fmt: skip


WAYS: dict[str, dict[str, Any]] = {
    "response_format": {
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    },
    "structured_outputs": {"structured_outputs": {"json": SCHEMA}},
    "as text": {"structured_outputs": {"json": json.dumps(SCHEMA)}},
    "guided_json": {"guided_json": SCHEMA},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("route", ["/v1/completions", "/v1/chat/completions"])
def test_a_json_schema_is_followed_by_every_name(running, way, route):
    for text in texts(ask(running, route, n=4, seed=1, **WAYS[way])):
        jsonschema_rs.validate(SCHEMA, json.loads(text))


def test_regexes_choices_and_grammars_are_followed(running):
    for text in texts(ask(running, n=4, guided_regex="[a-c]{2,5}/\\d")):
        assert re.fullmatch("[a-c]{2,5}/\\d", text)
    for text in texts(ask(running, n=4, structured_outputs={"choice": ["yes", "no\n/"]})):
        assert text in ("yes", "no\n/")
    for text in texts(ask(running, n=4, guided_grammar='start: "x" ("y" | "z"){1,3} "."')):
        assert re.fullmatch("x[yz]{1,3}\\.", text)


def test_a_dead_end_is_an_error_that_says_so_and_costs_nobody_else(running):
    """No token that is allowed fits the grammar."""
    stuck = {"guided_regex": "[a-c]{3}", "allowed_token_ids": [5, 6]}
    answer = ask(running, **stuck)
    assert answer.status_code == 400
    assert "allowed_token_ids" in answer.json()["error"]["message"]
    streamed = ask(running, stream=True, **stuck)
    events = [line[6:] for line in streamed.text.splitlines() if line.startswith("data: ")]
    assert "allowed_token_ids" in json.loads(events[-1])["error"]["message"]
    assert all("choices" not in json.loads(event) for event in events)
    assert re.fullmatch("[a-c]{3}", texts(ask(running, guided_regex="[a-c]{3}"))[0])
    running.wait_idle()


def test_it_is_counted_and_told_like_any_answer(running):
    body = {"logprobs": 2, "return_token_ids": True, "guided_choice": ["yes"], "echo": True}
    choice = ask(running, **body).json()["choices"][0]
    assert choice["text"] == "helloyes" and choice["finish_reason"] == "stop"
    assert choice["stop_reason"] is None
    drawn = choice["logprobs"]["tokens"][-len(choice["token_ids"]) :]
    assert "".join(drawn) == "yes"


def test_constraints_do_not_meet_beams_or_each_other(running):
    two = ask(running, guided_regex="a", response_format={"type": "json_object"})
    assert (two.status_code, two.json()["error"]["param"]) == (400, "response_format")
    beams = ask(running, guided_regex="a", use_beam_search=True, n=2)
    assert (beams.status_code, beams.json()["error"]["param"]) == (400, "guided_regex")


def test_a_structural_tag_by_response_format(running):
    tag = {
        "type": "structural_tag",
        "format": {"type": "tag", "begin": "<n>", "end": "</n>",
                   "content": {"type": "regex", "pattern": "[0-9]{2}"}},
    }  # fmt: skip
    for text in texts(ask(running, n=3, response_format=tag)):
        assert re.fullmatch("<n>[0-9]{2}</n>", text)
    bad = {**tag, "format": {"type": "tag", "begin": "<n>"}}
    refused = ask(running, response_format=bad)
    assert refused.status_code == 400
    assert "response_format.format.content" in refused.json()["error"]["message"]


def test_a_streamed_answer_equals_the_whole_one(running):
    fields = {"seed": 5, "temperature": 1, **WAYS["response_format"]}
    whole = ask(running, **fields).json()["choices"][0]["text"]
    streamed = ask(running, stream=True, **fields).text
    events = [line[6:] for line in streamed.splitlines() if line.startswith("data: {")]
    assert "".join(json.loads(event)["choices"][0]["text"] for event in events) == whole
