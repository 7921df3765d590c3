"""A request's own ``timeout``: in the queue, while its prompt is read, while it is generated."""

from __future__ import annotations

import json
import time

import httpx
import pytest

from tests.fixtures.waiting import PATIENCE, until
from tests.server import mock_server
from tests.server.test_lifecycle import ENDLESS, SLOW, Stream

CHAT = "/v1/chat/completions"
TEMPLATE = (
    "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    "{% for i in range(turns or 0) %}{% for k in range(100) %}{% endfor %}{% endfor %}"
)


@pytest.fixture(scope="module")
def gate(tmp_path_factory):
    return tmp_path_factory.mktemp("timeouts") / "gate"


@pytest.fixture(scope="module")
def slow(gate):
    engine = {"max_num_seqs": 1, "gate": str(gate), **SLOW}
    with mock_server.start(engine=engine, template=TEMPLATE) as server:
        yield server
        server.wait_idle()


def timed(server, path="/v1/completions", **body):
    begin = time.monotonic()
    answer = httpx.post(server.url + path, json=body, timeout=PATIENCE)
    return answer, time.monotonic() - begin


def test_a_plain_request_ends_with_408_and_its_tokens_are_told(slow):
    answer, seconds = timed(slow, **ENDLESS, timeout=0.4)
    assert answer.status_code == 408
    assert seconds > 0.3
    error = answer.json()["error"]
    assert (error["type"], error["code"], error["param"]) == ("timeout_error", "timeout", "timeout")
    assert "0.4 s" in error["message"] and "tokens were generated" in error["message"]
    assert answer.headers["x-should-retry"] == "false"
    slow.wait_idle()


def test_a_stream_that_has_begun_ends_with_an_error_event(slow):
    answer, seconds = timed(slow, **ENDLESS, timeout=0.4, stream=True)
    assert answer.status_code == 200
    events = [json.loads(e.removeprefix("data: ")) for e in answer.text.split("\n\n") if e]
    assert len(events) > 3 and events[0]["choices"]
    assert events[-1]["error"]["code"] == "timeout"
    assert seconds > 0.3
    slow.wait_idle()


@pytest.mark.parametrize("stream", [False, True])
def test_one_that_waits_in_the_queue_is_refused_in_time(slow, gate, stream):
    gate.unlink(missing_ok=True)
    running = Stream(slow, prompt="say:held")
    answer, _ = timed(slow, **ENDLESS, timeout=0.3, stream=stream)
    assert answer.status_code == 408
    assert "in the queue" in answer.json()["error"]["message"]
    assert slow.metric("vllm:num_requests_waiting") == 0
    assert slow.metric("vllm:num_requests_running") == 1  # while the other goes on
    gate.touch()
    assert running.join() == "data: [DONE]"


def test_one_whose_template_takes_longer_is_refused_in_time(slow):
    before = slow.metric("octavo_requests_timed_out_total")
    body = {"messages": [{"role": "user", "content": "say:x"}]}
    kwargs = {"turns": 18_000}
    answer, whole = timed(slow, CHAT, **body, chat_template_kwargs=kwargs)
    assert answer.status_code == 200
    tries = 0

    def refused_in_time():
        nonlocal tries
        tries += 1
        answer, seconds = timed(slow, CHAT, **body, timeout=0.05, chat_template_kwargs=kwargs)
        assert answer.status_code == 408
        assert "prompt was being read" in answer.json()["error"]["message"]
        return seconds < whole / 2

    until(refused_in_time, f"a refusal sooner than {whole / 2:.2f} s, half of the template's time")
    assert slow.metric("octavo_requests_timed_out_total") == before + tries


def test_a_beam_search_ends_in_time(slow):
    body = {"prompt": "endless", "max_tokens": 400, "use_beam_search": True, "n": 1}
    answer, _ = timed(slow, **body, timeout=0.4)
    assert (answer.status_code, answer.json()["error"]["code"]) == (408, "timeout")
    slow.wait_idle()


def test_one_that_is_done_in_time_is_not_touched(slow):

    def answered():
        answer, seconds = timed(slow, prompt="say:abc", timeout=1.0)
        return (answer, seconds) if answer.status_code == 200 else None

    answer, seconds = until(answered)  # a machine that stands still uses up a request's time
    before = slow.metric("octavo_requests_timed_out_total")
    assert answer.json()["choices"][0]["text"] == "abc"
    time.sleep(max(0, 1.2 - seconds))  # nor is it counted when its time is up
    assert slow.metric("octavo_requests_timed_out_total") == before


@pytest.mark.parametrize("value", [0, -1, "soon", 1e300])
def test_senseless_timeouts_are_refused(slow, value):
    answer, _ = timed(slow, prompt="x", timeout=value)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "timeout")
