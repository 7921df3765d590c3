"""Engine requests that an HTTP request makes batch by batch: parts of many prompts, steps of a
search. All of them end with it, however it ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

from octavo.engine.messages import AddRequest
from octavo.engine.streams import RequestStream, StepEvents
from octavo.server.auth import Receive
from octavo.server.errors import ClientGone, StepError
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
        self._gone = False

    def begin(self) -> None:
        self._state.check_serving()
        self._state.num_in_flight += 1
        self._watcher = asyncio.get_running_loop().create_task(self._watch_client())

    async def run(self, requests: Sequence[AddRequest]) -> AsyncIterator[StepEvents]:
        """The events of these requests until all have ended. Raises what ``submit`` of the client
        raises, InvalidRequest (refused by the engine), StepError, EngineDead or ClientGone."""
        if self._gone:
            raise ClientGone
        client = self._state.client
        self._stream = client.submit(requests, continuing=self._stream is not None)
        async for events in self._stream:
            if events.more is not None:
                for rejected in events.more.rejected:
                    raise InvalidRequest(rejected.message, rejected.param)
                for end in events.more.finished:
                    if end.reason == FinishReason.ERROR:
                        raise StepError(end.message or "a step of the engine failed")
            yield events

    def close(self) -> None:
        """Aborts what has not ended. Idempotent."""
        if self._watcher is None:
            return
        self._watcher.cancel()
        self._watcher = None
        self._state.num_in_flight -= 1
        if self._stream is not None:
            self._state.client.abort(list(self._stream.open))

    async def _watch_client(self) -> None:
        """Reads on: after the body only the end of the connection can come."""
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._gone = True
        if self._stream is not None:
            self._stream.fail(ClientGone())
            self._state.client.abort(list(self._stream.open))
