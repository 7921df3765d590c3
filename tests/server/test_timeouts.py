"""A request's own ``timeout``: in the queue, while its prompt is read, while it is generated."""

from __future__ import annotations

import json
import time

import httpx
import pytest

from tests.server import mock_server
from tests.server.test_lifecycle import SLOW, Stream

ENDLESS = {"prompt": "endless", "max_tokens": 500}
CHAT = "/v1/chat/completions"
TEMPLATE = (
    "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    "{% for i in range(turns or 0) %}{% for k in range(100) %}{% endfor %}{% endfor %}"
)


@pytest.fixture(scope="module")
def slow():
    with mock_server.start(engine={"max_num_seqs": 1, **SLOW}, template=TEMPLATE) as server:
        yield server
        server.wait_idle()


def timed(server, path="/v1/completions", **body):
    begin = time.monotonic()
    answer = httpx.post(server.url + path, json=body, timeout=20)
    return answer, time.monotonic() - begin


def test_a_plain_request_ends_with_408_and_its_tokens_are_told(slow):
    answer, seconds = timed(slow, **ENDLESS, timeout=0.4)
    assert answer.status_code == 408
    assert 0.3 < seconds < 2
    error = answer.json()["error"]
    assert (error["type"], error["code"], error["param"]) == ("timeout_error", "timeout", "timeout")
    assert "0.4 s" in error["message"] and "tokens were generated" in error["message"]
    assert answer.headers["x-should-retry"] == "false"
    slow.wait_idle(0.5)


def test_a_stream_that_has_begun_ends_with_an_error_event(slow):
    answer, seconds = timed(slow, **ENDLESS, timeout=0.4, stream=True)
    assert answer.status_code == 200
    events = [json.loads(e.removeprefix("data: ")) for e in answer.text.split("\n\n") if e]
    assert len(events) > 3 and events[0]["choices"]
    assert events[-1]["error"]["code"] == "timeout"
    assert 0.3 < seconds < 2
    slow.wait_idle(0.5)


@pytest.mark.parametrize("stream", [False, True])
def test_one_that_waits_in_the_queue_is_refused_in_time(slow, stream):
    running = Stream(slow, max_tokens=120)
    answer, seconds = timed(slow, **ENDLESS, timeout=0.3, stream=stream)
    assert answer.status_code == 408
    assert "in the queue" in answer.json()["error"]["message"]
    assert seconds < 1.5
    assert slow.metric("vllm:num_requests_waiting") == 0
    assert running.join(10) == "data: [DONE]"


def test_one_whose_template_takes_longer_is_refused_in_time(slow):
    before = slow.metric("octavo_requests_timed_out_total")
    body = {"messages": [{"role": "user", "content": "say:x"}]}
    kwargs = {"turns": 18_000}
    answer, seconds = timed(slow, CHAT, **body, timeout=0.1, chat_template_kwargs=kwargs)
    assert answer.status_code == 408
    assert "prompt was being read" in answer.json()["error"]["message"]
    assert seconds < 0.5
    assert slow.metric("octavo_requests_timed_out_total") == before + 1


def test_a_beam_search_ends_in_time(slow):
    body = {"prompt": "endless", "max_tokens": 400, "use_beam_search": True, "n": 1}
    answer, seconds = timed(slow, **body, timeout=0.4)
    assert (answer.status_code, answer.json()["error"]["code"]) == (408, "timeout")
    assert seconds < 2
    slow.wait_idle(0.5)


def test_one_that_is_done_in_time_is_not_touched(slow):
    before = slow.metric("octavo_requests_timed_out_total")
    answer, seconds = timed(slow, prompt="say:abc", timeout=1.5)
    assert answer.json()["choices"][0]["text"] == "abc"
    time.sleep(1.7 - seconds)  # nor is it counted when its time is up
    assert slow.metric("octavo_requests_timed_out_total") == before


@pytest.mark.parametrize("value", [0, -1, "soon", 1e300])
def test_senseless_timeouts_are_refused(slow, value):
    answer, _ = timed(slow, prompt="x", timeout=value)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "timeout")
