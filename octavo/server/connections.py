"""uvicorn's HTTP protocol with bounds for what a client sends before anybody knows who it is, and
with writes that wait for each other (``writes``).

uvicorn keeps a request's head until it is complete, however long that gets or takes, and copies a
header's value with each part of it: 100 MB of one would hold everybody up for 20 s.
"""

from __future__ import annotations

import asyncio
import re

import msgspec
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from octavo.server.writes import BatchedTransport, WriteBatch

MOST_HEAD_BYTES = 128 << 10  # of a request's line and headers, beside one read of the socket
HEAD_SECONDS = 60.0  # in which they must have come; as long as uvicorn keeps an idle connection

# An offer to go on with HTTP/2 (Java's clients make it), which is answered by HTTP/1.1. httptools
# would take what follows for HTTP/2 and lose the body.
_OFFER = re.compile(rb"(?i)(?<=\n)upgrade(?=:[ \t]*h2c[ \t]*\r?\n)")


def batched_protocol() -> type[asyncio.Protocol]:
    """uvicorn's HTTP protocol, its connections sharing one new batch of writes."""
    batch = WriteBatch()

    class BoundedProtocol(HttpToolsProtocol):
        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(BatchedTransport(transport, batch))  # type: ignore[arg-type]
            self._in_head = True
            self._unread = 0  # bytes since something of a request was complete
            self._timer = self.loop.call_later(HEAD_SECONDS, self._on_slow_head)

        def connection_lost(self, exc: Exception | None) -> None:
            self._timer.cancel()
            super().connection_lost(exc)

        def data_received(self, data: bytes) -> None:
            if self._in_head and b"h2c" in data:
                head, end, rest = data.partition(b"\r\n\r\n")
                data = _OFFER.sub(b"offered", head + b"\r\n") + end[2:] + rest if end else data
            self._unread += len(data)
            super().data_received(data)
            if self._unread > MOST_HEAD_BYTES and not self.transport.is_closing():
                self._refuse(431, f"the head of a request is longer than {MOST_HEAD_BYTES} bytes")

        def on_message_begin(self) -> None:
            self._unread = 0
            self._in_head = True
            if self._timer.cancelled():
                self._timer = self.loop.call_later(HEAD_SECONDS, self._on_slow_head)
            super().on_message_begin()

        def on_headers_complete(self) -> None:
            self._unread = 0
            self._in_head = False
            self._timer.cancel()
            super().on_headers_complete()

        def on_body(self, body: bytes) -> None:
            self._unread = 0
            super().on_body(body)

        def on_message_complete(self) -> None:
            self._unread = 0
            self._in_head = True
            super().on_message_complete()

        def _on_slow_head(self) -> None:
            if self.transport.is_closing():
                return
            if self._answering():  # nothing is read meanwhile
                self._timer = self.loop.call_later(HEAD_SECONDS, self._on_slow_head)
            else:
                self._refuse(408, f"no request came within {HEAD_SECONDS:g} s")

        def _answering(self) -> bool:
            return self.cycle is not None and not self.cycle.response_complete

        def _refuse(self, status: int, message: str) -> None:
            """Ends the connection; with an answer where none is being written."""
            if not self._answering():
                self.transport.write(_refusal(status, message))
            self.transport.close()

    return BoundedProtocol


_REASONS = {408: b"Request Timeout", 431: b"Request Header Fields Too Large"}


def _refusal(status: int, message: str) -> bytes:
    error = {
        "message": message,
        "type": "invalid_request_error",
        "param": None,
        "code": "invalid_request",
    }
    body = msgspec.json.encode({"error": error})
    return b"HTTP/1.1 %d %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\n%b%b" % (
        status,
        _REASONS[status],
        len(body),
        b"connection: close\r\n\r\n",
        body,
    )
