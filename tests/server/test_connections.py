"""What clients send before anybody knows who they are: bounded in size and time."""

from __future__ import annotations

import asyncio
import contextlib
import json
import select
import socket
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from starlette.requests import Request

from octavo.server import bodies, connections
from octavo.server.errors import TimedOut
from octavo.server.protocol import NoFields
from octavo.server.workers import MOST_ARRIVING, Workers
from tests.fixtures.waiting import PATIENCE, come, until
from tests.server import mock_server

BODY = json.dumps({"prompt": "say:hello", "max_tokens": 5}).encode()
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"


@pytest.fixture(scope="module")
def server():
    with mock_server.start() as running:
        yield running


def connected(server) -> socket.socket:
    host, port = server.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=PATIENCE)


def sent(server, begin: bytes, part: bytes, most: int) -> tuple[int, bytes]:
    """Sends ``begin``, then ``part`` until the server answers: bytes sent, and its answer."""
    with connected(server) as client:
        answer: list[bytes] = []
        reader = threading.Thread(target=lambda: answer.append(_read(client)))
        reader.start()
        num_sent = 0
        try:
            client.sendall(begin)
            while num_sent < most and not answer:
                client.sendall(part)
                num_sent += len(part)
        except OSError:
            pass
        reader.join(PATIENCE)
        return num_sent, b"".join(answer)


def _read(client: socket.socket) -> bytes:
    out = b""
    try:
        while data := client.recv(65536):
            out += data
    except OSError:
        pass
    return out


def _resident(pid: int) -> int:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * 4096


@pytest.mark.parametrize(
    ("begin", "part"),
    [
        (HEAD + b"X: ", b"a" * 65536),
        (HEAD, b"x: y\r\n" * 10_000),
        (b"POST /", b"a" * 65536),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\n1;", b"e" * 65536),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\n0\r\nX: ", b"t" * 65536),
    ],
    ids=["a header", "headers", "a path", "chunk extension", "trailer"],
)
def test_a_head_without_end_is_cut_off_before_it_takes_memory_or_time(server, begin, part):
    before = _resident(server.process.pid)
    num_sent, answer = sent(server, begin, part, most=64 << 20)
    assert num_sent < 16 << 20  # what the sockets hold, and a little
    assert _resident(server.process.pid) - before < 16 << 20
    if answer:  # a reset may overtake it
        assert b" 431 " in answer.split(b"\r\n")[0] or b" 400 " in answer.split(b"\r\n")[0]
    assert server.complete("say:hello")["choices"][0]["text"] == "hello"


def test_large_heads_within_the_bound_and_large_bodies_are_served(server):
    with connected(server) as client:
        text = b"a" * (100 << 10)
        length = b"Content-Length: %d\r\nX: %b\r\nConnection: close\r\n\r\n"
        client.sendall(HEAD + length % (len(BODY), text))
        client.sendall(BODY)
        assert b" 200 " in _read(client).split(b"\r\n")[0]
    long = server.post("/tokenize", prompt="a" * 1_000_000)
    assert long.status_code == 200 and long.json()["count"] == 1_000_001


def test_requests_sent_one_after_the_other_without_waiting_are_all_answered(server):
    one = HEAD + b"Content-Length: %d\r\n\r\n%b" % (len(BODY), BODY)
    last = one.replace(b"Host: x", b"Host: x\r\nConnection: close")
    with connected(server) as client:
        client.sendall(one * 99 + last)
        assert _read(client).count(b"HTTP/1.1 200 OK") == 100


def test_an_offer_of_http_2_is_passed_over_and_the_body_read(server):
    """As Java's client makes it with its first request."""
    offer = (
        b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\n"
        b"HTTP2-Settings: AAEAAEAAAAIAAAABAAMAAABkAAQBAAAAAAUAAEAA\r\n"
    )
    head = HEAD + offer + b"Content-Length: %d\r\n\r\n" % len(BODY)
    for parts in ([head + BODY], [head, BODY]):
        with connected(server) as client:
            for part in parts:
                client.sendall(part)
                time.sleep(0.05)
            answer = client.recv(65536)
            assert b" 200 " in answer.split(b"\r\n")[0] and b"hello" in answer


def offered(client: socket.socket, data: bytes) -> None:
    """Sends it to the end, or until there is an answer."""
    client.setblocking(False)
    rest = memoryview(data)
    while rest:
        answers, ready, _ = select.select([client], [client], [], PATIENCE)
        assert answers or ready, "neither read nor answered"
        if answers:
            return
        with contextlib.suppress(BlockingIOError):
            rest = rest[client.send(rest[: 1 << 20]) :]


def test_bodies_that_never_end_take_bounded_memory_and_leave_room_again(server):
    before = _resident(server.process.pid)
    head = HEAD + b"Content-Length: %d\r\n\r\n" % (32 << 20)
    clients = [connected(server) for _ in range(16)]
    for client in clients:
        offered(client, head + b" " * (31 << 20))
    answered, _, _ = select.select(clients, [], [], 0)
    refused = sum(b" 429 " in _read(client).split(b"\r\n")[0] for client in answered)
    assert 4 <= refused <= 9
    assert _resident(server.process.pid) - before < 400 << 20
    for client in clients:
        client.close()
    until(lambda: server.post("/tokenize", prompt="a" * (8 << 20)).status_code != 429)
    assert server.complete("say:hello")["choices"][0]["text"] == "hello"


def test_a_body_of_which_no_more_comes_is_given_up(monkeypatch):
    monkeypatch.setattr(bodies, "BODY_SECONDS", 0.05)
    parts = [b"{", b" ", None]

    async def receive():
        if (part := parts.pop(0)) is None:
            await asyncio.sleep(10)
        return {"type": "http.request", "body": part, "more_body": True}

    async def run() -> None:
        app = SimpleNamespace(state=SimpleNamespace(workers=Workers()))
        scope = {"type": "http", "headers": [], "app": app}
        with pytest.raises(TimedOut, match="no more of the body"):
            await bodies.read_body(Request(scope, receive), NoFields)
        app.state.workers.hold(MOST_ARRIVING)  # nothing is left of it

    asyncio.run(run())


class _Transport(asyncio.Transport):
    def __init__(self) -> None:
        super().__init__()
        self.sent, self.closed = b"", False

    def write(self, data: bytes) -> None:
        self.sent += data

    def close(self) -> None:
        self.closed = True

    def is_closing(self) -> bool:
        return self.closed


def test_a_head_that_does_not_come_ends_its_connection(monkeypatch):
    monkeypatch.setattr(connections, "HEAD_SECONDS", 0.05)

    async def run() -> list[_Transport]:
        import uvicorn

        release = asyncio.Event()

        async def app(scope, receive, send) -> None:
            await release.wait()
            await send({"type": "http.response.start", "status": 204, "headers": []})
            await send({"type": "http.response.body", "body": b""})

        config = uvicorn.Config(app, lifespan="off", log_config=None)
        config.load()
        kind = connections.batched_protocol()
        state = uvicorn.server.ServerState()
        transports = []
        for begin in (b"", b"GET / HT", b"GET / HTTP/1.1\r\nX: y\r\n", b"GET / HTTP/1.1\r\n\r\n"):
            protocol = kind(config=config, server_state=state, app_state={})
            transports.append(_Transport())
            protocol.connection_made(transports[-1])
            if begin:
                protocol.data_received(begin)
        await come(lambda: all(transport.closed for transport in transports[:3]))
        assert not transports[3].closed  # it takes longer than a head may
        release.set()
        await come(lambda: transports[3].sent)
        for connection in state.connections:
            connection._unset_keepalive_if_required()
        return transports

    silent, half, open_ended, answered = asyncio.run(run())
    for transport in (silent, half, open_ended):
        assert transport.closed and b" 408 " in transport.sent.split(b"\r\n")[0]
    assert not answered.closed and b" 204 " in answered.sent.split(b"\r\n")[0]
