"""Engine requests that an HTTP request makes batch by batch: parts of many prompts, steps of a
search. All of them end with it, however it ends."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence

from octavo.engine.messages import AddRequest
from octavo.engine.streams import RequestStream, StepEvents
from octavo.server.auth import Receive
from octavo.server.errors import ClientGone, TimedOut, failure_of
from octavo.server.state import ServerState
from octavo.types import FinishReason, InvalidRequest


class Submission:
    """From ``begin`` until ``close`` the HTTP request counts as in flight and its client's end is
    watched for. The queue's bounds hold for the first batch; later ones go on with what was
    admitted."""

    def __init__(self, state: ServerState, receive: Receive) -> None:
        self._state = state
        self._receive = receive
        self._stream: RequestStream | None = None
        self._watcher: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._failure: Exception | None = None
        self._started = False  # the engine has begun with it

    def begin(self, arrival: float, timeout: float | None) -> None:
        """``timeout``: seconds after ``arrival`` at which it fails with TimedOut."""
        self._state.check_serving()
        self._state.num_in_flight += 1
        loop = asyncio.get_running_loop()
        self._watcher = loop.create_task(self._watch_client())
        if timeout is not None:
            left = max(0.0, arrival + timeout - time.monotonic())
            self._timer = loop.call_later(left, self._time_out, timeout)

    async def run(self, requests: Sequence[AddRequest]) -> AsyncIterator[StepEvents]:
        """The events of these requests until all have ended. Raises what ``submit`` of the client
        raises, InvalidRequest (refused by the engine), StepError, EngineDead, TimedOut or
        ClientGone."""
        if self._failure is not None:
            raise self._failure
        client = self._state.client
        self._stream = client.submit(requests, continuing=self._stream is not None)
        async for events in self._stream:
            if events.more is not None:
                self._started = self._started or bool(events.more.started)
                for rejected in events.more.rejected:
                    raise InvalidRequest(rejected.message, rejected.param)
                for end in events.more.finished:
                    if end.reason == FinishReason.ERROR:
                        raise failure_of(end)
            yield events

    def close(self) -> None:
        """Aborts what has not ended. Idempotent."""
        if self._watcher is None:
            return
        self._watcher.cancel()
        self._watcher = None
        if self._timer is not None:
            self._timer.cancel()
        self._state.num_in_flight -= 1
        if self._stream is not None:
            self._state.client.abort(list(self._stream.open))

    async def _watch_client(self) -> None:
        """Reads on: after the body only the end of the connection can come."""
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._fail(ClientGone())

    def _time_out(self, timeout: float) -> None:
        self._state.metrics.num_timed_out += 1
        doing = "not all of it was computed" if self._started else "it was still in the queue"
        self._fail(TimedOut(f"the request's timeout of {timeout:g} s has passed: {doing}"))

    def _fail(self, failure: Exception) -> None:
        self._failure = self._failure or failure
        if self._stream is not None:
            self._stream.fail(failure)
            self._state.client.abort(list(self._stream.open))
