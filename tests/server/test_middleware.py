"""--middleware: classes and functions, around everything, seeing streamed parts too."""

from __future__ import annotations

import pytest

from octavo.server.middleware import wrapped
from octavo.types import ConfigError
from tests.server import mock_server

HERE = "tests.server.middlewares"


@pytest.fixture(scope="module")
def server():
    settings = {"middleware": [f"{HERE}.Stamp", f"{HERE}.teapot"], "api_key": ["secret"]}
    with mock_server.start(server=settings) as running:
        running.client.headers["authorization"] = "Bearer secret"
        yield running


def test_they_see_every_response_also_of_requests_without_a_key(server):
    for key, status in (("Bearer secret", 200), ("Bearer wrong", 401)):
        answer = server.client.get("/v1/models", headers={"authorization": key})
        assert answer.status_code == status
        assert answer.headers["x-stamp"] == "1" and answer.headers["x-tea"] == "yes"


def test_one_may_answer_itself(server):
    answer = server.client.get("/teapot")
    assert (answer.status_code, answer.text) == (418, "short and stout")
    assert answer.headers["x-stamp"] == "1"


def test_the_parts_of_a_stream_go_through_them(server):
    answer = server.post("/v1/completions", prompt="say:hello", stream=True)
    blocks = [block for block in answer.text.split("\n\n") if block]
    assert blocks[0] == ": stamped" and blocks[-1] == "data: [DONE]"
    assert answer.text.count(": stamped") > 1
    assert server.complete("say:hello")["choices"][0]["text"] == "hello"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nodots", "must be a dotted path"),
        ("no.such.module", "No module named 'no'"),
        (f"{HERE}.Absent", "has no attribute 'Absent'"),
        (f"{HERE}.NOTHING", "must be an ASGI class, or a coroutine function"),
        (f"{HERE}.Broken", "no such luck"),
    ],
)
def test_what_cannot_be_used_ends_the_start_in_one_line(name, message):
    async def app(scope, receive, send):
        raise AssertionError

    with pytest.raises(ConfigError, match="--middleware") as error:
        wrapped(app, [name])
    assert message in str(error.value) and "\n" not in str(error.value)
