"""The engine requests of one HTTP request: all of them end with it, however it ends."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence

from octavo.engine.messages import AddRequest
from octavo.engine.streams import RequestStream, StepEvents
from octavo.server.auth import Receive
from octavo.server.errors import ClientGone, TimedOut, failure_of
from octavo.server.measures import EngineMeasures
from octavo.server.state import ServerState
from octavo.types import FinishReason, InvalidRequest


class Submission:
    """From the first ``submit`` until ``close`` the HTTP request counts as in flight, its timeout
    runs, and it is noticed when the client leaves. Work that goes batch by batch (parts of a long
    list, steps of a search) submits again: the queue's bounds hold for the first batch only, as
    later ones continue what was admitted."""

    def __init__(
        self,
        state: ServerState,
        receive: Receive,
        arrival: float,
        timeout: float | None,
        doing: Callable[[], str],
        admitted: bool = False,
        hint: bytes = b"",
    ) -> None:
        """``timeout``: seconds after ``arrival`` at which it fails; ``doing`` then says what was
        under way. ``admitted``: the queue's bounds do not hold for the first batch either.
        ``hint``: equal for requests that the client says share a prefix."""
        self._state = state
        self._receive = receive
        self._arrival = arrival
        self._timeout = timeout
        self._doing = doing
        self._admitted = admitted
        self._hint = hint
        self._stream: RequestStream | None = None
        self._watcher: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._failure: Exception | None = None

    def submit(self, requests: Sequence[AddRequest]) -> RequestStream:
        """The stream of their events; it fails with TimedOut or ClientGone. Raises what the
        client's ``submit`` raises, and these two if they came between two batches."""
        if self._failure is not None:
            raise self._failure
        is_first = self._stream is None
        continuing = self._admitted or not is_first
        self._stream = self._state.client.submit(requests, continuing, self._hint)
        if is_first:
            self._begin()
        return self._stream

    async def run(self, requests: Sequence[AddRequest]) -> AsyncIterator[StepEvents]:
        """The events of these requests until all have ended. Raises besides what ``submit`` does:
        InvalidRequest (refused by the engine), StepError, EngineDead."""
        async for events in self.submit(requests):
            if events.more is not None:
                for rejected in events.more.rejected:
                    raise InvalidRequest(rejected.message, rejected.param)
                for end in events.more.finished:
                    if end.reason == FinishReason.ERROR:
                        raise failure_of(end)
            yield events

    def measures(self, handle: int) -> EngineMeasures:
        """Where that is measured which becomes of a handle submitted last."""
        assert self._stream is not None
        return self._state.metrics.of(self._stream.engine_of[handle])

    def close(self) -> None:
        """Aborts what has not ended. Idempotent."""
        if self._watcher is None or self._stream is None:
            return
        self._watcher.cancel()
        self._watcher = None
        if self._timer is not None:
            self._timer.cancel()
        self._state.num_in_flight -= 1
        self._state.client.abort(list(self._stream.open))

    def _begin(self) -> None:
        self._state.num_in_flight += 1
        loop = asyncio.get_running_loop()
        self._watcher = loop.create_task(self._watch_client())
        if self._timeout is not None:
            left = self._arrival + self._timeout - time.monotonic()
            self._timer = loop.call_later(max(0.0, left), self._time_out, self._timeout)

    async def _watch_client(self) -> None:
        """Reads on: after the body only the end of the connection can come."""
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._fail(ClientGone())

    def _time_out(self, timeout: float) -> None:
        self._state.metrics.num_timed_out += 1
        message = f"the request's timeout of {timeout:g} s has passed: {self._doing()}"
        self._fail(TimedOut(message))

    def _fail(self, failure: Exception) -> None:
        self._failure = self._failure or failure
        if self._stream is not None:
            self._stream.fail(failure)
            self._state.client.abort(list(self._stream.open))
