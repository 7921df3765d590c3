"""Many clients of a completions route at once, in one thread, as cheap as clients can be.

Each opens a connection, sends its request, keeps what comes and notes when the first event came;
the answers are read only when all have ended. On a machine that the clients share with the server,
what they spend on reading is taken from the server.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast
from urllib.parse import urlsplit

import uvloop

EVENT = b"data: {"


@dataclass(frozen=True)
class Answer:
    """``first``: seconds from the common start to the first bytes of an event (or of the body)."""

    first: float
    events: list[dict[str, Any]]  # a whole answer is one event


class _Client(asyncio.Protocol):
    def __init__(self, request: bytes) -> None:
        self.request = request
        self.received: list[bytes] = []
        self.first_time = 0.0
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        cast(asyncio.Transport, transport).write(self.request)

    def data_received(self, data: bytes) -> None:
        self.received.append(data)
        if not self.first_time and (EVENT in data or len(self.received) > 1):
            self.first_time = time.perf_counter()

    def connection_lost(self, exc: Exception | None) -> None:
        if exc is None:
            self.ended.set_result(None)
        else:
            self.ended.set_exception(exc)


def run(url: str, bodies: Sequence[dict[str, Any]]) -> tuple[float, list[Answer]]:
    """Sends all bodies at once to URL/v1/completions. Seconds until the last answer has ended, and
    the answers. RuntimeError for one that is not 200."""
    return uvloop.run(_run(url, bodies))


async def _run(url: str, bodies: Sequence[dict[str, Any]]) -> tuple[float, list[Answer]]:
    loop = asyncio.get_running_loop()
    address = urlsplit(url)
    requests = [_request(address.netloc, body) for body in bodies]
    began = time.perf_counter()
    pairs = await asyncio.gather(
        *(
            loop.create_connection(lambda r=request: _Client(r), address.hostname, address.port)
            for request in requests
        )
    )
    clients = [client for _, client in pairs]
    await asyncio.gather(*(client.ended for client in clients))
    seconds = time.perf_counter() - began
    return seconds, [
        Answer(client.first_time - began, _events(b"".join(client.received))) for client in clients
    ]


def _request(host: str, body: dict[str, Any]) -> bytes:
    content = json.dumps(body).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\n"
        f"content-type: application/json\r\ncontent-length: {len(content)}\r\n\r\n"
    )
    return head.encode() + content


def _events(raw: bytes) -> list[dict[str, Any]]:
    head, _, body = raw.partition(b"\r\n\r\n")
    status, *fields = head.lower().split(b"\r\n")
    if status.split()[1] != b"200":
        raise RuntimeError(f"{status.decode()}: {body.decode(errors='replace')}")
    if b"transfer-encoding: chunked" in fields:
        body = _joined(body)
    if b"content-type: application/json" in fields:
        return [json.loads(body)]
    events = [event.removeprefix(b"data: ") for event in body.split(b"\n\n") if event]
    if events.pop() != b"[DONE]":
        raise RuntimeError(f"a stream ended without [DONE]: {body[-200:]!r}")
    return [json.loads(event) for event in events]


def _joined(chunked: bytes) -> bytes:
    parts, at = [], 0
    while True:
        end = chunked.index(b"\r\n", at)
        size = int(chunked[at:end], 16)
        if not size:
            return b"".join(parts)
        parts.append(chunked[end + 2 : end + 2 + size])
        at = end + 4 + size
