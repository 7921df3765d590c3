"""What a client's engine has been given and has not ended: counts, and the queue that they make."""

from __future__ import annotations

import time

from octavo.config import SchedulerConfig
from octavo.engine.admission import QueueGate
from octavo.engine.forecast import PlaceForecast, PlaceWaits
from octavo.engine.messages import REJECTED, AddRequest, EngineStats, num_ids
from octavo.engine.streams import RequestStream
from octavo.types import FinishReason

FORECAST_SECONDS = 0.02  # for which a forecast of places is used again


class Entry:
    """A submitted request that has not ended. Shared by its n handles."""

    __slots__ = (
        *("handle", "max_tokens", "n", "num_open", "num_prompt_tokens", "num_tokens", "queued"),
        "stream",
    )

    def __init__(self, request: AddRequest, stream: RequestStream) -> None:
        self.handle = request.handle
        self.n = self.num_open = request.params.n
        self.num_prompt_tokens = num_ids(request.prompt_ids)
        self.num_tokens = 0  # output of all its choices
        self.max_tokens = request.max_tokens
        self.queued = True  # counted by the gate: none of its choices has started
        self.stream = stream


class Accounts:
    """Sequences (a request with n choices counts n) by handle. Always: ``num_admitted`` ==
    ``num_running`` + ``num_waiting`` + the sum of ``ended``.

    Nothing enters before ``begin``.
    """

    def __init__(self, config: SchedulerConfig, num_clients: int) -> None:
        """``num_clients``: of the engine; each lets in its part of the queue."""
        self.entries: dict[int, Entry] = {}  # by every open handle
        self.num_admitted = 0
        self.ended = dict.fromkeys([reason.value for reason in FinishReason] + [REJECTED], 0)
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

    def enter(self, request: AddRequest, stream: RequestStream) -> None:
        """A request was sent; all its sequences wait."""
        entry = Entry(request, stream)
        self.gate.enter(entry.num_prompt_tokens, time.monotonic())
        handles = range(request.handle, request.handle + entry.n)
        self.entries.update(dict.fromkeys(handles, entry))
        self._waiting.update(handles)
        self.num_admitted += entry.n

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
            self._leave_queue(entry, started=False)
        entry.stream.open.discard(handle)
        if not entry.stream.open:
            entry.stream.wake()

    def _leave_queue(self, entry: Entry, started: bool) -> None:
        if entry.queued:
            entry.queued = False
            self.gate.leave(entry.num_prompt_tokens, time.monotonic(), started)
