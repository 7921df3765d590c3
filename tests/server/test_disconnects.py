"""T38: clients that leave, whatever their request is going through, cost the others nothing."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path
from typing import Any

import pytest

from tests.fixtures.waiting import PATIENCE, until
from tests.server import mock_server
from tests.server.test_lifecycle import SLOW

PER_PHASE = 50
TEMPLATE = (
    "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    "{% for i in range(turns or 0) %}{% for k in range(100) %}{% endfor %}{% endfor %}"
)
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
ENDLESS = {"prompt": "endless", "max_tokens": 20_000}  # minutes: what is over sooner was ended
USER = [{"role": "user", "content": "say:x"}]

# What the request is doing when its client leaves -> (route, body).
PHASES: dict[str, tuple[str, dict[str, Any]]] = {
    "queued or running": (TEXT, ENDLESS),
    "validated": (TEXT, {"prompt": [7] * 300_000, "max_tokens": 1}),
    "tokenized": (TEXT, {"prompt": "x" * 900_000, "max_tokens": 1, "truncate_prompt_tokens": 9}),
    "rendered": (
        CHAT,
        {"messages": USER, "max_tokens": 1, "chat_template_kwargs": {"turns": 15_000}},
    ),
}


def request(path: str, body: dict[str, Any]) -> bytes:
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    return head.encode() + b"content-length: %d\r\n\r\n" % len(content) + content


def connect(server: mock_server.MockServer) -> socket.socket:
    host, port = server.url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)), timeout=PATIENCE)
    return connection


def cpu_seconds(server: mock_server.MockServer) -> float:
    """Of the process that speaks HTTP: less than others' use of the machine makes of a clock."""
    fields = Path(f"/proc/{server.process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@pytest.mark.parametrize("phase", PHASES)
def test_clients_that_leave_while_their_request_is(phase):
    path, body = PHASES[phase]
    engine = {"step_seconds": 0.01, "max_model_len": 1_000_000, "num_blocks": 100_000}
    limits = {"max_num_queued_reqs": 1000, "max_queue_wait": 1000.0}
    with mock_server.start(engine, scheduler=limits, template=TEMPLATE) as server:
        begin = cpu_seconds(server)
        if phase in ("tokenized", "rendered"):
            assert server.post(path, **body).status_code == 200
        one = cpu_seconds(server) - begin
        before = server.metric("octavo_requests_admitted_total")
        open_ones = []
        for i in range(PER_PHASE):
            connection = connect(server)
            connection.sendall(request(path, {**body, "stream": i % 2 == 0}))
            open_ones.append(connection)
        if phase == "queued or running":
            until(lambda: server.metric("octavo_requests_admitted_total") == PER_PHASE)
        for connection in open_ones:
            connection.close()
        server.wait_idle()
        # Long enough for the threads: it waits for what they still do for the others.
        server.complete("x" * 20_000, max_tokens=1)
        admitted = server.metric("octavo_requests_admitted_total") - before - 1
        assert admitted <= PER_PHASE
        if phase == "queued or running":
            aborted = server.metric("vllm:request_success_total", finished_reason="abort")
            assert admitted == aborted == PER_PHASE
        elif phase != "validated":  # which is soon done
            assert admitted < PER_PHASE / 2
            spent = cpu_seconds(server) - begin
            assert spent < one * PER_PHASE / 2, "what nobody waits for was done"
        assert "Traceback" not in server.log


def test_clients_that_leave_at_any_moment_leave_nothing_behind():
    """Before the end of the body, in the first step, after the first event."""
    engine = {**SLOW, "step_seconds": 0.05, "max_num_seqs": 40}
    with mock_server.start(
        engine, scheduler={"max_num_queued_reqs": 1000, "max_queue_wait": 1000.0}
    ) as server:
        whole = request(TEXT, ENDLESS)
        streamed = request(TEXT, {**ENDLESS, "stream": True})
        for i in range(100):
            connection = connect(server)
            connection.sendall(whole[:-3] if i % 4 == 0 else (whole, streamed)[i % 2])
            if i % 10 == 1:
                assert b"200 OK" in connection.recv(4096)
            connection.close()
        server.wait_idle()
        assert server.metric("vllm:num_requests_running") == 0
        assert server.metric("octavo_requests_admitted_total") == server.metric(
            "vllm:request_success_total", finished_reason="abort"
        )
        assert server.complete("say:x")["choices"][0]["text"] == "x"
        assert "Traceback" not in server.log
