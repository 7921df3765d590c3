"""The client of an engine process: starts it, feeds it, fans its outputs out, judges its health.

One event loop owns a ``ProcessClient``. Messages from the engine are read in one callback per
wake-up and sorted into the streams that wait for them; a consumer that is slower than the engine
gets the events of several steps at once. Never imports torch.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from octavo.config import EngineConfig
from octavo.engine.accounts import Accounts, Entry, Origin
from octavo.engine.health import Health
from octavo.engine.launch import Launched, Launcher, LocalLauncher
from octavo.engine.messages import (
    CLIENT_SHIFT,
    Abort,
    AddRequest,
    Bye,
    Drain,
    EngineInfo,
    EngineStats,
    Failed,
    FromEngine,
    Heartbeat,
    Hello,
    Outputs,
    PrefixCacheReset,
    Progress,
    Ready,
    ResetPrefixCache,
    SetVocabulary,
    num_ids,
    shift,
)
from octavo.engine.sockets import ClientSockets
from octavo.engine.streams import RequestStream
from octavo.grammar.vocabulary import Vocabulary
from octavo.types import ConfigError, EngineDead, EngineLost, FinishReason

logger = logging.getLogger("octavo")

CHECK_INTERVAL = 0.25
_serials = itertools.count(1)


@dataclass(frozen=True)
class Seat:
    """Which of an engine's clients this is. The first one starts the engine, and judges it; the
    others are given the directory of the sockets. The first one makes a directory, and removes
    it, where none is given."""

    index: int = 0
    count: int = 1
    directory: Path | None = None

    @property
    def first_handle(self) -> int:
        """Of those that this client may use."""
        return (self.index << CLIENT_SHIFT) + 1


class ProcessClient:
    """One engine process and the requests it has.

    States: loading → ready ⇄ late ⇄ stalled → dead. Late means that a step has taken half of
    ``--step-deadline``: nothing new is taken, what is open goes on. Stalled means no heartbeat for
    1.5 s: open streams end with EngineDead, and heartbeats that return make it ready again. A step,
    or a silence, longer than ``--step-deadline`` ends the process. ``num_running`` and
    ``num_waiting`` count sequences (a request with n choices counts n).
    """

    def __init__(
        self,
        config: EngineConfig,
        on_progress: Callable[[Progress], None] | None = None,
        launcher: Launcher | None = None,
        seat: Seat = Seat(),
        name: str = "",
        index: int = 0,
    ) -> None:
        """``launcher``: where the engine runs (None: a process of this machine); ``name``: in the
        log, of the engine where there are several; ``index``: its number among them."""
        self.config = config
        self.name = name
        self.serial = next(_serials)  # no other client in this process has it
        # Begins a request again on another engine, once this one is lost; False: it cannot.
        self.rescue: Callable[[Entry], bool] = lambda entry: False
        # The first client has started another engine in the place of this one's, which is here.
        self.on_replaced: Callable[[EngineInfo], None] = lambda info: None
        self.stats = EngineStats(time=0.0)
        self.draining = False
        self.on_step: Callable[[EngineStats], None] | None = None
        self._launcher = launcher or LocalLauncher()
        self._on_progress = on_progress
        self._info: EngineInfo | None = None
        self._engine = 0  # its number
        self._accounts = Accounts(config.scheduler, seat.count, index)
        self._health = Health(config.scheduler.step_deadline)
        self.seat = seat
        self._next_handle = seat.first_handle
        self._child: Launched | None = None
        self._lost: list[int] = []  # handles that the engine may still work on, for nobody
        self._calls: dict[int, asyncio.Future[bool]] = {}
        self._closing = False
        self._leaving = False  # the engine's machine is wanted back
        self._tasks: list[asyncio.Task[None]] = []
        self._has_sockets = False
        self._closed: asyncio.Future[None] | None = None

    # ---- life ----

    async def start(self) -> None:
        """Starts the engine process and returns at once; ``ready`` waits for it. Raises
        ConfigError when the temporary directory cannot hold the sockets."""
        self._loop = asyncio.get_running_loop()
        self._ready: asyncio.Future[EngineInfo] = self._loop.create_future()
        self.dead = asyncio.Event()
        self._sockets = ClientSockets(
            self._launcher, self.seat.index, self.seat.directory, self._handle, self._on_cut
        )
        self._has_sockets = True
        self._tasks = [self._loop.create_task(self._watch_heartbeat())]
        if self.seat.index == 0:
            await self._start_engine()
        else:
            self._tasks.append(self._loop.create_task(self._say_hello()))

    async def _start_engine(self) -> None:
        addresses = self._sockets.addresses(self.seat.count)
        self._child = await self._launcher.launch(*addresses, self.config)
        self._tasks.append(self._loop.create_task(self._watch_child(self._child)))
        self._tasks.append(self._loop.create_task(self._watch_leaving(self._child)))

    async def _say_hello(self) -> None:
        """Until the engine has connected."""
        while True:
            with contextlib.suppress(EngineDead):
                self._sockets.send(Hello(client=self.seat.index))
                return
            await asyncio.sleep(0.05)

    async def ready(self) -> EngineInfo:
        """Waits until the engine has loaded. Raises ConfigError (the user can mend it) or
        EngineDead."""
        return await asyncio.shield(self._ready)

    @property
    def info(self) -> EngineInfo:
        if self._info is None:
            raise EngineDead("the model is still loading")
        return self._info

    @property
    def directory(self) -> Path:
        """Of the sockets."""
        return self._sockets.directory

    @property
    def pid(self) -> int | None:
        """Of the engine, where this client has started it."""
        return self._child.pid if self._child is not None else None

    @property
    def _judges(self) -> bool:
        """Whether this client ends the engine, where it must be. For the others it stays stalled:
        the first one may start another in its place."""
        return self.seat.index == 0

    @property
    def step_age(self) -> float:
        """Seconds that the step under way had taken when the engine was last heard."""
        return self._health.step_age

    @property
    def alive(self) -> bool:
        return not self._health.death

    def problem(self) -> str | None:
        """Why the engine cannot serve now, or None when it makes progress."""
        health = self._health
        if problem := health.death or health.stalled or health.late:
            return problem
        return None if self._info is not None else "the model is still loading"

    async def close(self, grace: float = 2.0) -> None:
        """Ends the process (killing it after ``grace`` seconds) and removes the sockets. May be
        called again, and goes on where its caller is cancelled."""
        if self._closed is None:
            self._closed = asyncio.ensure_future(self._close(grace))
        await asyncio.shield(self._closed)

    async def _close(self, grace: float) -> None:
        if not self._has_sockets:
            return
        self._closing = True
        self._fail_all(EngineDead("the server is shutting down"))
        if self._child is not None:
            await self._child.end(grace)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._sockets.close()

    # ---- counts ----

    @property
    def num_running(self) -> int:
        return self._accounts.num_running

    @property
    def num_waiting(self) -> int:
        return self._accounts.num_waiting

    @property
    def num_waiting_tokens(self) -> int:
        return self._accounts.num_waiting_tokens

    @property
    def num_pending_tokens(self) -> int:
        """Prompt tokens of the requests of which nothing has come back yet, but for those that the
        engine is thought to have cached."""
        return self._accounts.num_pending_tokens

    @property
    def num_open(self) -> int:
        """Sequences that have not ended."""
        return len(self._accounts.entries)

    @property
    def num_admitted(self) -> int:
        """Sequences ever taken."""
        return self._accounts.num_admitted

    @property
    def ended(self) -> dict[str, int]:
        """Sequences ever ended: by finish reason, or REJECTED."""
        return self._accounts.ended

    @property
    def queue_tokens(self) -> dict[str, int]:
        """Prompt tokens ever ADMITTED to the queue, STARTED, DROPPED (engine.accounts)."""
        return self._accounts.queue_tokens

    @property
    def most_queued(self) -> int:
        """How many requests may wait in this client. Raises EngineDead as ``submit`` does."""
        self._require_ready()
        return self._accounts.gate.max_requests

    @property
    def most_taken(self) -> int:
        """As ``most_queued``, with those that free places take at once."""
        return self.most_queued + max(0, self.info.max_num_seqs - self.num_running)

    # ---- requests ----

    def allocate(self, count: int) -> int:
        """The first of ``count`` consecutive unused handles."""
        first = self._next_handle
        self._next_handle += count
        return first

    def submit(self, requests: Sequence[AddRequest], continuing: bool = False) -> RequestStream:
        """Sends prepared requests, all or none, and returns the stream of their events.
        ``continuing``: they go on with work that was admitted before, so the queue's bounds do not
        hold for them.

        Raises EngineDead when the engine cannot take them, QueueFull when too much waits.
        """
        self._require_ready()
        if not continuing:
            num_tokens = sum(num_ids(r.prompt_ids) for r in requests)
            self.check_queue(len(requests), num_tokens, sum(r.params.n for r in requests))
        stream = self.stream_of(requests)
        for request in requests:
            self.enter(Origin(request), stream)
        return stream

    def stream_of(self, requests: Sequence[AddRequest]) -> RequestStream:
        """Where the events of these requests will be; ``enter`` sends them."""
        handles = [r.handle + i for r in requests for i in range(r.params.n)]
        return RequestStream(self._loop, handles)

    def enter(self, origin: Origin, stream: RequestStream) -> None:
        """Sends a request whose events go to a stream that is there. Raises EngineDead."""
        self._require_ready()
        request = origin.request
        if offset := self._clock_offset:
            request = msgspec.structs.replace(request, arrival=request.arrival - offset)
        self._sockets.send(request)
        self._accounts.enter(origin, stream)

    def check_queue(self, num_requests: int, num_tokens: int = 0, num_sequences: int = 1) -> None:
        """Raises what ``submit`` would raise for so much more, before work is spent on it."""
        self._require_ready()
        self._accounts.check_queue(self.stats, num_requests, num_tokens, num_sequences)

    def abort(self, handles: Iterable[int], reason: FinishReason = FinishReason.ABORT) -> None:
        """Drops handles that are still open; their events end here and now. ``reason`` is how
        they are counted: STOP for those that met a stop string."""
        known = [handle for handle in handles if handle in self._accounts.entries]
        if not known:
            return
        for handle in known:
            self._accounts.end(handle, reason)
        self._free(known)

    def fail_all(self, error: Exception) -> None:
        """Ends every open stream with ``error`` and frees their requests in the engine."""
        self._free(self._fail_all(error))

    async def reset_prefix_cache(self) -> bool:
        """Whether the cache could be emptied (not while requests hold blocks of it)."""
        self._require_ready()
        call = self.allocate(1)
        self._calls[call] = self._loop.create_future()
        try:
            self._sockets.send(ResetPrefixCache(call=call))
            return await self._calls[call]
        finally:
            del self._calls[call]

    def send_vocabulary(self, vocabulary: Vocabulary) -> None:
        """Before the first request with a grammar."""
        if not self._health.death:
            with contextlib.suppress(EngineDead):
                self._sockets.send(SetVocabulary(vocabulary))

    def drain(self) -> None:
        """Nothing new is taken from now on; the process ends after its last output."""
        if self.draining:
            return
        self.draining = True
        # With several clients the engine is ended by the first one, when all have drained.
        if self._info is not None and not self._health.death and self.seat.count == 1:
            with contextlib.suppress(EngineDead):
                self._sockets.send(Drain())

    def forget_client(self, index: int) -> None:
        """Another client of the engine has died: what it asked for is dropped."""
        with contextlib.suppress(EngineDead):
            self._sockets.send(Bye(client=index))

    # ---- wire ----

    def _require_ready(self) -> None:
        if self.draining:
            who = "the engine's node" if self._leaving else "the server"
            raise EngineDead(f"{who} is shutting down")
        if problem := self.problem():
            raise EngineDead(problem)

    def _handle(self, message: FromEngine) -> None:
        if isinstance(message, Outputs):
            if offset := self._clock_offset:
                shift(message, offset)
            self._fan_out(message)
        elif isinstance(message, Heartbeat):
            self._health.hear(message, time.monotonic())
        elif isinstance(message, Progress):
            if self._on_progress:
                self._on_progress(message)
        elif isinstance(message, Ready) and message.engine != self._engine:
            self._begin(message)
        elif isinstance(message, PrefixCacheReset):
            call = self._calls.get(message.call)
            if call is not None and not call.done():
                call.set_result(message.success)
        elif isinstance(message, Failed) and (self._judges or self._info is None):
            self.die(message.message, message.user_error)

    @property
    def _clock_offset(self) -> float:
        """From the engine's clock to this machine's."""
        return self._child.clock_offset if self._child is not None else 0.0

    def _begin(self, ready: Ready) -> None:
        """The engine has loaded: the first one, or one in the place of one that died."""
        replaced = self._info is not None
        if replaced:
            self._lose(EngineLost("the engine has been started again"))
            self.serial = next(_serials)
            self._health = Health(self.config.scheduler.step_deadline)
        self._info, self._engine = ready.info, ready.engine
        self._accounts.begin(ready.info.max_num_seqs)
        self._health.begin(time.monotonic())
        if replaced:
            self.on_replaced(ready.info)
        elif not self._ready.done():
            self._ready.set_result(ready.info)

    def _fan_out(self, outputs: Outputs) -> None:
        self.stats = stats = outputs.stats
        self._accounts.take(outputs)
        if stats.step_seconds:
            self._accounts.forecast.on_step(stats.step_seconds)
        if self.on_step is not None:
            self.on_step(stats)

    def _free(self, handles: list[int]) -> None:
        """What the engine has of them is dropped."""
        if handles and not self._health.death:
            with contextlib.suppress(EngineDead):
                self._sockets.send(Abort(handles=handles))

    def _lose(self, error: EngineDead) -> list[int]:
        """The engine is dead or stalled: of what it has, that of which nothing has come yet goes
        on elsewhere where that is possible; the rest ends with ``error``."""
        handles = list(self._accounts.entries)
        for entry in dict.fromkeys(self._accounts.entries.values()):
            if entry.fresh and self.rescue(entry):
                self._accounts.hand_over(entry)
        num_failed = len(self._fail_all(error))
        if handles:
            logger.warning(
                "%s%s; of its %d sequences %d go on elsewhere, %d end with an error",
                f"{self.name}: " if self.name else "", error, len(handles),
                len(handles) - num_failed, num_failed,
            )  # fmt: skip
        return handles

    def _fail_all(self, error: Exception) -> list[int]:
        handles = list(self._accounts.entries)
        for handle in handles:
            self._accounts.entries[handle].stream.fail(error)
            self._accounts.end(handle, FinishReason.ERROR)
        for call in self._calls.values():
            if not call.done():
                call.set_exception(error)
        return handles

    # ---- health ----

    async def _watch_child(self, child: Launched) -> None:
        how = await child.wait()
        self._sockets.read()  # it may have said why
        if self._leaving and not how:
            self.die("its node has left")
        elif not (self._closing or (self.draining and not how and not self.num_open)):
            self.die(f"the engine process ended {how or 'with exit code 0'}")

    async def _watch_leaving(self, child: Launched) -> None:
        await child.leaving()
        self._leaving = True
        if self._info is None:
            self.die("its node has left while it loaded")
        self.drain()

    async def _watch_heartbeat(self) -> None:
        while not self._health.death:
            before = time.monotonic()
            await asyncio.sleep(CHECK_INTERVAL)
            now = time.monotonic()
            if self._info is None or now - before > CHECK_INTERVAL + 0.5:
                continue  # not loaded yet; or this process itself was held up: look again
            self._sockets.read()
            self._judge(now)

    def _judge(self, now: float) -> None:
        fault = self._health.judge(now)
        if fault and self._judges:
            self.die(fault)
            return
        self._health.stalled = fault or self._health.stalled
        if self._health.stalled and self._accounts.entries:
            self._lost += self._lose(EngineLost(self._health.stalled))
            self._free(self._lost)
        elif self._lost and not self._health.stalled:  # what was sent while it stood still is gone
            self._free(self._lost)
            self._lost = []

    def _on_cut(self) -> None:
        """A connection has ended: what was on its way is lost, so nothing that is open can go on.
        It is made again by itself."""
        self._sockets.read()  # what had come before
        if self._closing or self._health.death:
            return
        if self._info is None and self._child is not None:
            self.die("its connection was cut while it loaded")
        elif self._accounts.entries:
            self._lost += self._lose(EngineLost("the connection to the engine was cut"))

    def die(self, why: str, user_error: bool = False) -> None:
        """Ends the engine, and everything that waits for it. The first reason counts."""
        if self._health.death:
            return
        self._health.death = why
        if self._child is not None:
            self._child.kill(why, user_error)
        error = ConfigError(why) if user_error else EngineDead(why)
        if not self._ready.done():
            self._ready.set_exception(error)
            self._ready.exception()  # it may be awaited later, or never
        self._lose(EngineLost(why))
        self.dead.set()
