"""Server-sent events from ready-made bytes, and the ASGI response that sends them."""

from __future__ import annotations

import asyncio
import logging
from typing import Protocol

import msgspec
from starlette.responses import Response

from octavo.server.auth import Receive, Scope, Send
from octavo.server.errors import ClientGone, error_body
from octavo.server.generation import Generation, Piece
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


class StreamedAnswer(Protocol):
    """What an EventStream needs of an answer."""

    generation: Generation

    def events(self, batch: list[Piece]) -> bytes:
        """The events that these pieces make; b"" for none."""

    async def first_events(self, batch: list[Piece]) -> bytes:
        """As ``events``, for pieces that bring the prompt's log-probabilities."""

    def ending(self) -> bytes:
        """What follows the last piece's events."""


class EventStream(Response):
    """Sends events as they come, and closes the generation however that ends.

    An error after the start becomes an ``error`` event, and the stream ends without [DONE].
    """

    def __init__(self, answer: StreamedAnswer) -> None:
        self.answer = answer
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
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            # A task of its own: to resume this one for each token goes through all middlewares.
            await asyncio.create_task(self._send_events(scope["octavo.send"]))
        finally:
            self.answer.generation.close()

    async def _send_events(self, send: Send) -> None:
        answer = self.answer
        try:
            async for batch in answer.generation.pieces():
                if answer.generation.num_prompt_logprobs and any(p.is_first for p in batch):
                    events = await answer.first_events(batch)
                else:
                    events = answer.events(batch)
                if events:
                    await send({"type": BODY, "body": events, "more_body": True})
            last = answer.ending()
        except ClientGone:
            return
        except Exception as error:
            if not isinstance(error, OctavoError):
                logger.exception("a stream failed")
            last = b"data: " + error_body(error) + b"\n\n"
        await send({"type": BODY, "body": last, "more_body": True})
        await send({"type": BODY, "body": b"", "more_body": False})
