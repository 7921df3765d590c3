"""What a client's engine has been given and has not ended: counts, and the queue that they make."""

from __future__ import annotations

import time
from dataclasses import dataclass

from octavo.config import SchedulerConfig
from octavo.engine.admission import QueueGate
from octavo.engine.forecast import PlaceForecast, PlaceWaits
from octavo.engine.messages import (
    ADMITTED,
    DROPPED,
    REJECTED,
    RETRIED,
    STARTED,
    AddRequest,
    EngineStats,
    Outputs,
    Started,
    num_ids,
)
from octavo.engine.streams import RequestStream
from octavo.types import FinishReason

FORECAST_SECONDS = 0.02  # for which a forecast of places is used again


def no_ends() -> dict[str, int]:
    """Counts of how sequences ended, all 0."""
    return dict.fromkeys([*(reason.value for reason in FinishReason), REJECTED, RETRIED], 0)


def no_tokens() -> dict[str, int]:
    """Counts of what became of prompt tokens, all 0."""
    return dict.fromkeys((ADMITTED, STARTED, DROPPED), 0)


class Entry:
    """A submitted request that has not ended. Shared by its n handles."""

    __slots__ = (
        *("handle", "max_tokens", "n", "num_open", "num_pending", "num_prompt_tokens"),
        *("num_tokens", "origin", "queued", "stream", "told"),
    )

    def __init__(self, request: AddRequest, stream: RequestStream, origin: Origin) -> None:
        self.handle = request.handle
        self.n = self.num_open = request.params.n
        self.num_prompt_tokens = num_ids(request.prompt_ids)
        self.num_pending = max(0, self.num_prompt_tokens - origin.num_cached)
        self.num_tokens = 0  # output of all its choices
        self.max_tokens = request.max_tokens
        self.queued = True  # counted by the gate: none of its choices has started
        self.told = False  # its stream holds more of it than that it started
        self.stream = stream
        self.origin = origin

    @property
    def fresh(self) -> bool:
        """Nothing has come of it, so that another engine can begin it again unnoticed."""
        return not self.told and self.num_open == self.n


@dataclass(slots=True)
class Origin:
    """Where a request comes from: what it takes to begin it again on another engine.
    ``num_cached``: tokens of its prompt that its engine is thought to have computed before;
    ``tried``: which engine processes have had it (their clients' ``serial``); ``suspect``: how
    many of them were lost after they had started it; ``hint``: for the router."""

    request: AddRequest
    num_cached: int = 0
    tried: tuple[int, ...] = ()
    suspect: int = 0
    hint: bytes = b""


class Accounts:
    """Sequences (a request with n choices counts n) by handle. Always: ``num_admitted`` ==
    ``num_running`` + ``num_waiting`` + the sum of ``ended``, which has RETRIED for those that went
    on with another engine. And of ``queue_tokens``, the prompts' (once each, whatever n is):
    ADMITTED == STARTED + DROPPED (they ended before a choice was scheduled) +
    ``num_waiting_tokens``.

    Nothing enters before ``begin``.
    """

    def __init__(self, config: SchedulerConfig, num_clients: int, engine: int = 0) -> None:
        """``num_clients``: of the engine; each lets in its part of the queue. ``engine``: its
        number among the server's."""
        self.engine = engine
        self.entries: dict[int, Entry] = {}  # by every open handle
        self.num_admitted = 0
        self.ended = no_ends()
        self.queue_tokens = no_tokens()
        self.num_pending_tokens = 0  # of prompts of which nothing has come back yet
        self.forecast = PlaceForecast()
        self._config = config
        self._num_clients = num_clients
        self._gate: QueueGate | None = None
        self._max_num_seqs = 0
        self._waiting: set[int] = set()  # open handles that were not scheduled yet
        self._waits: PlaceWaits | None = None  # as of ``_waits_time``
        self._waits_time = 0.0

    def begin(self, max_num_seqs: int) -> None:
        """The engine has loaded; it runs at most ``max_num_seqs`` sequences at a time."""
        self._gate = QueueGate(self._config, max_num_seqs, self._num_clients)
        self._max_num_seqs = max_num_seqs

    @property
    def num_running(self) -> int:
        return len(self.entries) - len(self._waiting)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_waiting_tokens(self) -> int:
        """Prompt tokens of the requests none of whose sequences has started."""
        return self._gate.num_tokens if self._gate is not None else 0

    @property
    def gate(self) -> QueueGate:
        assert self._gate is not None
        return self._gate

    def check_queue(
        self, stats: EngineStats, num_requests: int, num_tokens: int, num_sequences: int
    ) -> None:
        """Raises QueueFull or InvalidRequest where so much more may not wait. ``stats``: the
        engine's latest."""
        now = time.monotonic()
        running, waiting = self.num_running, self.num_waiting
        if self._num_clients > 1:  # those of the other clients count, as of the last step
            running = max(running, stats.num_running)
            waiting = max(waiting, stats.num_waiting)
        free = self._max_num_seqs - running
        position = waiting + num_sequences - 1 - free
        # Of the places that become free, this client sees its own share.
        wait = self._place_wait(position // self._num_clients, now) if position >= 0 else 0.0
        self.gate.check(num_requests, num_tokens, now, free, wait)

    def _place_wait(self, position: int, now: float) -> float:
        """Seconds until that many places beyond the first will have become free."""
        if self._waits is None or now - self._waits_time > FORECAST_SECONDS:
            self._waits_time = now
            running = (e for h, e in self.entries.items() if h not in self._waiting)
            self._waits = self.forecast.waits((e.num_tokens // e.n, e.max_tokens) for e in running)
        return self._waits.of(position) - (now - self._waits_time)

    def enter(self, origin: Origin, stream: RequestStream) -> None:
        """A request was sent; all its sequences wait."""
        request = origin.request
        entry = Entry(request, stream, origin)
        self.gate.enter(entry.num_prompt_tokens, time.monotonic())
        self.num_pending_tokens += entry.num_pending
        handles = range(request.handle, request.handle + entry.n)
        self.entries.update(dict.fromkeys(handles, entry))
        self._waiting.update(handles)
        self.num_admitted += entry.n
        self.queue_tokens[ADMITTED] += entry.num_prompt_tokens
        stream.engine_of.update(dict.fromkeys(handles, self.engine))

    def start(self, handle: int, entry: Entry) -> None:
        """A sequence was scheduled for the first time."""
        self._waiting.discard(handle)
        self._leave_queue(entry, started=True)

    def end(self, handle: int, reason: str) -> None:
        """An open sequence has ended; its stream does once all its sequences have."""
        entry = self.entries.pop(handle)
        self._waiting.discard(handle)
        self.ended[reason] += 1
        # Where at most one token could come (beams, vectors) nothing is learned of lengths.
        if entry.max_tokens > 1 and reason in (FinishReason.STOP, FinishReason.LENGTH):
            self.forecast.on_end(entry.num_tokens // entry.n, reason == FinishReason.STOP)
        entry.num_open -= 1
        if not entry.num_open:
            self._leave(entry)
        entry.stream.open.discard(handle)
        if not entry.stream.open:
            entry.stream.wake()

    def hand_over(self, entry: Entry) -> None:
        """Another engine goes on with all of the request; its stream stays as it is."""
        for handle in range(entry.handle, entry.handle + entry.n):
            del self.entries[handle]
            self._waiting.discard(handle)
        self.ended[RETRIED] += entry.n
        self._leave(entry)

    def take(self, outputs: Outputs) -> None:
        """Sorts what a step gave into the streams that wait for it."""
        entries = self.entries
        for started in outputs.started:
            if (entry := entries.get(started.handle)) is not None:
                self._take_start(started, entry)
        now = outputs.stats.time
        for pair in outputs.pairs():
            entry = entries.get(pair[0])
            if entry is not None:
                if not entry.num_tokens:
                    self._take_first(entry)
                entry.num_tokens += 1
                events = entry.stream.events()
                events.tokens.append(pair)
                events.time = now
        for row in outputs.logprobs:
            if (entry := entries.get(row.handle)) is not None:
                entry.stream.more().logprobs.append(row)
        for rows in outputs.prompt_logprobs:
            if (entry := entries.get(rows.handle)) is not None:
                entry.told = True
                entry.stream.more().prompt_logprobs.append(rows)
        for pooled in outputs.pooled:
            if (entry := entries.get(pooled.handle)) is not None:
                entry.told = True
                entry.stream.more().pooled.append(pooled)
        for finished in outputs.finished:
            if (entry := entries.get(finished.handle)) is not None:
                entry.told = True
                self.end(finished.handle, finished.reason)
                entry.stream.more().finished.append(finished)
        for rejected in outputs.rejected:
            if (entry := entries.get(rejected.handle)) is not None:
                for handle in range(entry.handle, entry.handle + entry.n):
                    if handle in entries:
                        self.end(handle, REJECTED)
                entry.stream.more().rejected.append(rejected)

    def _take_start(self, started: Started, entry: Entry) -> None:
        self.start(started.handle, entry)
        if started.handle not in entry.stream.started:  # else it has begun again elsewhere
            entry.stream.started.add(started.handle)
            entry.stream.more().started.append(started)

    def _take_first(self, entry: Entry) -> None:
        """The first token of a request: its prompt has been computed."""
        entry.told = True
        self.num_pending_tokens -= entry.num_pending
        entry.num_pending = 0

    def _leave(self, entry: Entry) -> None:
        """Nothing of the request is left here."""
        self._leave_queue(entry, started=False)
        self.num_pending_tokens -= entry.num_pending
        entry.num_pending = 0

    def _leave_queue(self, entry: Entry, started: bool) -> None:
        if entry.queued:
            entry.queued = False
            self.queue_tokens[STARTED if started else DROPPED] += entry.num_prompt_tokens
            self.gate.leave(entry.num_prompt_tokens, time.monotonic(), started)
