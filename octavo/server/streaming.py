"""Server-sent events from ready-made bytes, and the ASGI response that sends them."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator

import msgspec
from starlette.responses import Response

from octavo.server.auth import Receive, Scope, Send
from octavo.server.errors import ClientGone, error_body
from octavo.server.generation import Generation
from octavo.types import OctavoError

logger = logging.getLogger("octavo")

DONE = b"data: [DONE]\n\n"
BODY = "http.response.body"
encode_json = msgspec.json.Encoder().encode


class Frames:
    """Events of one response. What is equal in all of them is encoded once."""

    def __init__(self, head: dict[str, object]) -> None:
        self._head = b"data: " + encode_json(head)[:-1] + b',"choices":['

    def frame(self, choice: bytes, tail: bytes = b"") -> bytes:
        """One event with one choice (or none); ``tail``: further members, each after a comma."""
        return b"".join((self._head, choice, b"]", tail, b"}\n\n"))


def members(**values: object) -> bytes:
    """``,"name":value`` for each, to end an object with."""
    return b"".join(b',"' + name.encode() + b'":' + encode_json(v) for name, v in values.items())


class EventStream(Response):
    """Sends frames as they come, and closes the generation however that ends.

    An error after the start becomes an ``error`` event, and the stream ends without [DONE].
    """

    def __init__(self, generation: Generation, frames: AsyncIterator[bytes]) -> None:
        self.generation = generation
        self.frames = frames
        self.status_code = 200
        self.background = None
        self.media_type = "text/event-stream"
        self.init_headers(
            {
                "content-type": "text/event-stream; charset=utf-8",
                "cache-control": "no-cache",
                "x-accel-buffering": "no",
            }
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        send_body: Send = scope["octavo.send"]
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            try:
                async for frame in self.frames:
                    await send_body({"type": BODY, "body": frame, "more_body": True})
            except ClientGone:
                return
            except Exception as error:
                if not isinstance(error, OctavoError):
                    logger.exception("a stream failed")
                frame = b"data: " + error_body(error) + b"\n\n"
                await send_body({"type": BODY, "body": frame, "more_body": True})
            await send({"type": BODY, "body": b"", "more_body": False})
        finally:
            self.generation.close()
