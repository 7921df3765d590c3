"""Requests that nobody should send: by schemathesis from the OpenAPI document, and from
benchmarks/hostile.py, of which `make fuzz` sends 2,000 to each route of a real engine."""

from __future__ import annotations

import random
from collections.abc import Iterator

import hypothesis
import pytest
import schemathesis
from schemathesis import GenerationMode

from benchmarks import fuzz
from benchmarks.hostile import Attack, Hostile, request
from octavo.server.app import SCHEMAS
from tests.fixtures import server
from tests.fixtures.server import Server
from tests.fixtures.waiting import PATIENCE
from tests.server import mock_server
from tests.server.mock_server import MockServer

BODIES = 150  # for each route, here
EXAMPLES = 10  # for each operation and mode
ALLOWED = {200, 204, 400, 401, 404, 405, 408, 413, 429}


@pytest.fixture(scope="module")
def attacked(model_r) -> Iterator[Server]:
    with server.start(model_r, *fuzz.FLAGS) as running:  # its end is checked: nothing logged
        yield running


@pytest.fixture(autouse=True)
def no_hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """`make fuzz` allows an answer five seconds."""
    monkeypatch.setattr(fuzz, "LONGEST", PATIENCE)


def test_hostile_requests_are_answered_and_cost_nobody_anything(attacked: Server):
    """No 5xx, no hang, no second request; the golden answer and health after each block of 50."""
    tallies = fuzz.fuzz(attacked.client, attacked.port, BODIES, seed=2)
    for route, tally in tallies.items():
        assert tally.faults == [], route
        assert sum(tally.kinds.values()) == BODIES and tally.goldens == BODIES / fuzz.BLOCK
        assert len(tally.kinds) > 15 and tally.statuses["200"] and tally.statuses["400"]
    assert {"/v1/completions", "/v1/chat/completions", "/tokenize"} <= tallies.keys()
    assert all(fuzz.idle(attacked).values())


def test_the_judge_finds_what_it_looks_for():
    good = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n\r\n{}"
    bad = b'HTTP/1.1 400 Bad\r\ncontent-type: application/json\r\n\r\n{"error": {"message": NaN}}'
    attack = Attack("x", [request("/v1/completions", b"{}")])
    assert fuzz.judge(attack, good, False) == (["200"], None)
    assert fuzz.judge(attack, b"HTTP/1.1 100 Continue\r\n\r\n" + good, False)[0] == ["200"]
    for received in (
        b"", bad, good + good, good.replace(b"200", b"500"),
        b'HTTP/1.1 200 OK\r\n\r\ndata: {"error":{"type":"server_error"}}\n\n',
    ):  # fmt: skip
        assert fuzz.judge(attack, received, False)[1], received
    assert fuzz.judge(attack, b"", True) == (["reset"], None)


@pytest.fixture(scope="module")
def described() -> Iterator[MockServer]:
    with mock_server.start() as running:
        yield running


def send_examples(operation: schemathesis.APIOperation, mode: GenerationMode) -> None:
    """To one route and method; what breaks the document must be refused, too."""
    allowed = {400, 404} if mode == GenerationMode.NEGATIVE else ALLOWED

    @hypothesis.settings(
        max_examples=EXAMPLES,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=[*hypothesis.HealthCheck],
    )
    @hypothesis.given(case=operation.as_strategy(generation_mode=mode))
    def sent(case: schemathesis.Case) -> None:
        answer = case.call(timeout=fuzz.LONGEST)
        assert answer.status_code in allowed, (answer.status_code, answer.text)
        if answer.status_code >= 400:
            assert answer.json()["error"]["message"]

    sent()


@pytest.mark.parametrize("mode", [*GenerationMode])
def test_what_the_openapi_document_describes_is_answered(described: MockServer, mode):
    """By schemathesis: requests that fit the document, and bodies that do not."""
    document = schemathesis.openapi.from_url(f"{described.url}/openapi.json")
    operations = [found.ok() for found in document.get_all_operations()]
    assert len(operations) >= 16
    for operation in operations:
        if mode == GenerationMode.POSITIVE or required_fields(operation.path):
            send_examples(operation, mode)
            assert described.complete("say:golden")["choices"][0]["text"] == "golden"
    described.wait_idle()
    assert "Traceback" not in described.log


def required_fields(route: str) -> bool:
    """Whether the route has a body with fields that can be wrong."""
    return route in SCHEMAS and bool(SCHEMAS[route].model_fields)


def test_attacks_come_from_the_seed_and_know_every_route_and_field(described: MockServer):
    document = described.client.get("/openapi.json").json()
    hostile = Hostile(document)
    for route in hostile.routes:
        made = [hostile.attack(route, random.Random(f"{route} {n}")) for n in range(50)]
        again = [hostile.attack(route, random.Random(f"{route} {n}")) for n in range(50)]
        assert made == again and len({attack.kind for attack in made}) > 10
    schema = document["components"]["schemas"]["CompletionRequest"]
    assert set(hostile._fields["/v1/completions"]) == set(schema["properties"])
