"""The events of requests in an engine process, as their consumer reads them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, field

from octavo.engine.messages import (
    Finished,
    PooledPrompt,
    PromptLogprobRows,
    Rejected,
    Started,
    TokenLogprobRow,
)


@dataclass(slots=True)
class MoreEvents:
    """All but tokens: what most steps do not bring."""

    logprobs: list[TokenLogprobRow] = field(default_factory=list)  # in the order of the tokens
    prompt_logprobs: list[PromptLogprobRows] = field(default_factory=list)
    pooled: list[PooledPrompt] = field(default_factory=list)
    started: list[Started] = field(default_factory=list)
    finished: list[Finished] = field(default_factory=list)
    rejected: list[Rejected] = field(default_factory=list)


class StepEvents:
    """What happened to a stream's handles since it was last read, in order. One is made per stream
    and step, so it holds little."""

    __slots__ = ("more", "time", "tokens")

    def __init__(self) -> None:
        self.time = 0.0  # of the latest step in it
        self.tokens: list[tuple[int, int]] = []  # (handle, token id)
        self.more: MoreEvents | None = None


class RequestStream(AsyncIterator[StepEvents]):
    """The events of one or more requests; ends when all their handles have ended.

    Raises what ``fail`` was given: EngineDead from the client, or the consumer's own error.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, handles: Iterable[int]) -> None:
        self.open = set(handles)
        self.engine_of: dict[int, int] = {}  # the engine that has a handle, or had it last
        self.started: set[int] = set()  # handles whose Started is out: each is told once
        self._loop = loop
        self._pending: StepEvents | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._error: Exception | None = None

    def __aiter__(self) -> RequestStream:
        return self

    async def __anext__(self) -> StepEvents:
        while self._pending is None:
            if self._error is not None:
                raise self._error
            if not self.open:
                raise StopAsyncIteration
            self._waiter = self._loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        events, self._pending = self._pending, None
        return events

    def fail(self, error: Exception) -> None:
        """Ends the stream with ``error`` (the first one counts)."""
        if self._error is None:
            self._error = error
        self.wake()

    def events(self) -> StepEvents:
        """Where the next events go; wakes the consumer."""
        if self._pending is None:
            self._pending = StepEvents()
            self.wake()
        return self._pending

    def more(self) -> MoreEvents:
        """Where the next events go that are no tokens."""
        events = self.events()
        if events.more is None:
            events.more = MoreEvents()
        return events.more

    def wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
