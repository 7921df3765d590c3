"""The client of an engine process: starts it, feeds it, fans its outputs out, judges its health.

One event loop owns a ``ProcessClient``. Messages from the engine are read in one callback per
wake-up and sorted into the streams that wait for them; a consumer that is slower than the engine
gets the events of several steps at once. Never imports torch.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import zmq

from octavo.config import EngineConfig, available_cores, child_environment
from octavo.engine.admission import QueueGate
from octavo.engine.forecast import PlaceForecast, PlaceWaits
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
    ToEngine,
    encoder,
    from_engine_decoder,
    num_ids,
)
from octavo.engine.streams import RequestStream
from octavo.grammar.vocabulary import Vocabulary
from octavo.types import ConfigError, EngineDead, FinishReason

logger = logging.getLogger("octavo")

ENGINE_COMMAND = (sys.executable, "-m", "octavo.engine.process")
HEARTBEAT_LIMIT = 1.5  # seconds; the engine beats every 0.5 s
CHECK_INTERVAL = 0.25
FORECAST_SECONDS = 0.02  # that a forecast of places is used
REJECTED = "rejected"  # beside the finish reasons, in ``ProcessClient.ended``


@dataclass(frozen=True)
class Seat:
    """Which of an engine's clients this is. The first one starts the engine, and judges it; the
    others are given the directory of the sockets."""

    index: int = 0
    count: int = 1
    directory: Path | None = None


class _Entry:
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


class ProcessClient:
    """One engine process and the requests it has.

    States: loading → ready ⇄ stalled → dead. Stalled means no heartbeat for 1.5 s: open streams
    end with EngineDead, and heartbeats that return make it ready again. A step, or a silence,
    longer than ``--step-deadline`` ends the process. ``num_running`` and ``num_waiting`` count
    sequences (a request with n choices counts n).
    """

    def __init__(
        self,
        config: EngineConfig,
        on_progress: Callable[[Progress], None] | None = None,
        command: Sequence[str] = ENGINE_COMMAND,
        seat: Seat = Seat(),
    ) -> None:
        self.config = config
        self.stats = EngineStats(time=0.0)
        # Sequences ever admitted, and ever ended by reason. Always: num_admitted == num_running +
        # num_waiting + the sum of ``ended``.
        self.num_admitted = 0
        self.ended = dict.fromkeys([reason.value for reason in FinishReason] + [REJECTED], 0)
        self.draining = False
        self.on_step: Callable[[EngineStats], None] | None = None
        self._command = list(command)
        self._on_progress = on_progress
        self._info: EngineInfo | None = None
        self._gate: QueueGate | None = None
        self._forecast = PlaceForecast()
        self._waits: PlaceWaits | None = None  # as of ``_waits_time``
        self._waits_time = 0.0
        self._entries: dict[int, _Entry] = {}  # by every open handle
        self._waiting: set[int] = set()  # of those, the ones not scheduled yet
        self.seat = seat
        self._next_handle = (seat.index << CLIENT_SHIFT) + 1
        self._process: asyncio.subprocess.Process | None = None
        self._calls: dict[int, asyncio.Future[bool]] = {}
        self._last_beat = 0.0
        self._step_age = 0.0
        self._stalled = ""
        self._death = ""
        self._closing = False
        self._tasks: list[asyncio.Task[None]] = []

    # ---- life ----

    async def start(self) -> None:
        """Starts the engine process and returns at once; ``ready`` waits for it. Raises
        ConfigError when the temporary directory cannot hold the sockets."""
        self._loop = asyncio.get_running_loop()
        self._ready: asyncio.Future[EngineInfo] = self._loop.create_future()
        self.dead = asyncio.Event()
        own = self.seat.directory or Path(tempfile.mkdtemp(prefix="octavo-"))
        self.directory = own  # of the sockets
        self._context = zmq.Context()
        try:
            self._outbox = self._bound(zmq.PUSH, "inbox")
            self._inbox = self._bound(zmq.PULL, "outbox")
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            if self.seat.index == 0:
                shutil.rmtree(own, ignore_errors=True)
            raise ConfigError(
                f"cannot make a socket in {own}: {os.strerror(error.errno or 0)}; set "
                "TMPDIR to another directory"
            ) from None
        self._loop.add_reader(self._inbox.fileno(), self._read)
        self._tasks = [self._loop.create_task(self._watch_heartbeat())]
        if self.seat.index == 0:
            await self._start_engine()
        else:
            self._tasks.append(self._loop.create_task(self._say_hello()))

    async def _start_engine(self) -> None:
        threads = self.config.parallel.cpu_threads or available_cores()
        self._process = await asyncio.create_subprocess_exec(
            *self._command,
            ",".join(self._address("inbox", i) for i in range(self.seat.count)),
            ",".join(self._address("outbox", i) for i in range(self.seat.count)),
            str(os.getpid()),
            stdin=asyncio.subprocess.PIPE,
            env=child_environment(threads),
            start_new_session=True,  # Ctrl-C is for the server: it drains, then ends the engine
        )
        assert self._process.stdin is not None
        self._process.stdin.write(msgspec.msgpack.encode(self.config))
        with contextlib.suppress(ConnectionError):  # it died at once: _watch_process reports that
            await self._process.stdin.drain()
        self._process.stdin.close()
        self._tasks.append(self._loop.create_task(self._watch_process(self._process)))

    async def _say_hello(self) -> None:
        """Until the engine has connected."""
        while True:
            with contextlib.suppress(EngineDead):
                self._send(Hello(client=self.seat.index))
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
    def pid(self) -> int:
        """Of the engine, where this client has started it."""
        assert self._process is not None
        return self._process.pid

    @property
    def alive(self) -> bool:
        return not self._death

    @property
    def num_running(self) -> int:
        return len(self._entries) - len(self._waiting)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def problem(self) -> str | None:
        """Why the engine cannot serve now, or None when it makes progress."""
        if self._death or self._stalled:
            return self._death or self._stalled
        return None if self._info is not None else "the model is still loading"

    async def close(self, grace: float = 2.0) -> None:
        """Ends the process (killing it after ``grace`` seconds) and removes the sockets."""
        self._closing = True
        self._fail_all(EngineDead("the server is shutting down"))
        process = self._process
        if process is not None and process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGTERM)
            try:
                await asyncio.wait_for(process.wait(), grace)
            except TimeoutError:
                self._kill()
                await process.wait()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._loop.remove_reader(self._inbox.fileno())
        self._inbox.close(linger=0)
        self._outbox.close(linger=0)
        self._context.term()
        if self.seat.index == 0:
            shutil.rmtree(self.directory, ignore_errors=True)

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
        gate = self._require_gate()
        now = time.monotonic()
        if not continuing:
            num_tokens = sum(num_ids(r.prompt_ids) for r in requests)
            self.check_queue(len(requests), num_tokens, sum(r.params.n for r in requests))
        handles = [r.handle + i for r in requests for i in range(r.params.n)]
        stream = RequestStream(self._loop, handles)
        for request in requests:
            self._send(request)
            entry = _Entry(request, stream)
            gate.enter(entry.num_prompt_tokens, now)
            for i in range(entry.n):
                self._entries[request.handle + i] = entry
        self._waiting.update(handles)
        self.num_admitted += len(handles)
        return stream

    def check_queue(self, num_requests: int, num_tokens: int = 0, num_sequences: int = 1) -> None:
        """Raises what ``submit`` would raise for so much more, before work is spent on it."""
        gate, now = self._require_gate(), time.monotonic()
        running, waiting = self.num_running, self.num_waiting
        if self.seat.count > 1:  # those of the other clients count, as of the last step
            running = max(running, self.stats.num_running)
            waiting = max(waiting, self.stats.num_waiting)
        free = self.info.max_num_seqs - running
        position = waiting + num_sequences - 1 - free
        # Of the places that become free, this client sees its own share.
        wait = self._place_wait(position // self.seat.count, now) if position >= 0 else 0.0
        gate.check(num_requests, num_tokens, now, free, wait)

    def _place_wait(self, position: int, now: float) -> float:
        """Seconds until that many places beyond the first will have become free."""
        if self._waits is None or now - self._waits_time > FORECAST_SECONDS:
            self._waits_time = now
            running = (e for h, e in self._entries.items() if h not in self._waiting)
            self._waits = self._forecast.waits((e.num_tokens // e.n, e.max_tokens) for e in running)
        return self._waits.of(position) - (now - self._waits_time)

    def abort(self, handles: Iterable[int], reason: FinishReason = FinishReason.ABORT) -> None:
        """Drops handles that are still open; their events end here and now. ``reason`` is how
        they are counted: STOP for those that met a stop string."""
        known = [handle for handle in handles if handle in self._entries]
        if not known:
            return
        for handle in known:
            self._end(handle, reason)
        if not self._death:
            with contextlib.suppress(EngineDead):
                self._send(Abort(handles=known))

    def fail_all(self, error: Exception) -> None:
        """Ends every open stream with ``error`` and frees their requests in the engine."""
        handles = self._fail_all(error)
        if handles and not self._death:
            with contextlib.suppress(EngineDead):
                self._send(Abort(handles=handles))

    @property
    def num_open(self) -> int:
        """Sequences that have not ended."""
        return len(self._entries)

    @property
    def num_waiting_tokens(self) -> int:
        return self._gate.num_tokens if self._gate else 0

    @property
    def most_queued(self) -> int:
        """How many requests may wait in this client. Raises EngineDead as ``submit`` does."""
        return self._require_gate().max_requests

    async def reset_prefix_cache(self) -> bool:
        """Whether the cache could be emptied (not while requests hold blocks of it)."""
        self._require_gate()
        call = self.allocate(1)
        self._calls[call] = self._loop.create_future()
        try:
            self._send(ResetPrefixCache(call=call))
            return await self._calls[call]
        finally:
            del self._calls[call]

    def send_vocabulary(self, vocabulary: Vocabulary) -> None:
        """Before the first request with a grammar."""
        if not self._death:
            with contextlib.suppress(EngineDead):
                self._send(SetVocabulary(vocabulary))

    def drain(self) -> None:
        """Nothing new is taken from now on; the process ends after its last output."""
        if self.draining:
            return
        self.draining = True
        # With several clients the engine is ended by the first one, when all have drained.
        if self._info is not None and not self._death and self.seat.count == 1:
            with contextlib.suppress(EngineDead):
                self._send(Drain())

    def forget_client(self, index: int) -> None:
        """Another client of the engine has died: what it asked for is dropped."""
        with contextlib.suppress(EngineDead):
            self._send(Bye(client=index))

    # ---- wire ----

    def _bound(self, kind: int, name: str) -> zmq.Socket[bytes]:
        socket: zmq.Socket[bytes] = self._context.socket(kind)
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.setsockopt(zmq.RCVHWM, 0)
        socket.bind(self._address(name, self.seat.index))
        return socket

    def _address(self, name: str, index: int) -> str:
        return f"ipc://{self.directory}/{name}-{index}"

    def _require_gate(self) -> QueueGate:
        if self.draining:
            raise EngineDead("the server is shutting down")
        problem = self.problem()
        if problem or self._gate is None:
            raise EngineDead(problem or "the model is still loading")
        return self._gate

    def _send(self, message: ToEngine) -> None:
        try:
            self._outbox.send(encoder.encode(message), zmq.NOBLOCK)
        except zmq.Again:  # no peer is connected
            raise EngineDead("the engine process has closed its connection") from None

    def _read(self) -> None:
        """Reads all messages there are: ZMQ's descriptor is edge-triggered, so only an empty
        socket may end this. One message that cannot be handled does not cost the others."""
        while True:
            try:
                raw = self._inbox.recv(zmq.NOBLOCK)
            except zmq.ZMQError:
                return
            try:
                self._handle(from_engine_decoder.decode(raw))
            except Exception:
                logger.exception("a message of %d bytes from the engine failed", len(raw))

    def _handle(self, message: FromEngine) -> None:
        if isinstance(message, Outputs):
            self._fan_out(message)
        elif isinstance(message, Heartbeat):
            self._last_beat = max(self._last_beat, message.time)
            self._step_age = message.step_age
        elif isinstance(message, Progress):
            if self._on_progress:
                self._on_progress(message)
        elif isinstance(message, Ready) and self._info is None:
            self._info = message.info
            self._gate = QueueGate(
                self.config.scheduler, message.info.max_num_seqs, self.seat.count
            )
            self._last_beat = time.monotonic()
            if not self._ready.done():
                self._ready.set_result(message.info)
        elif isinstance(message, PrefixCacheReset):
            call = self._calls.get(message.call)
            if call is not None and not call.done():
                call.set_result(message.success)
        elif isinstance(message, Failed):
            self._die(message.message, message.user_error)

    def _fan_out(self, outputs: Outputs) -> None:
        entries = self._entries
        self.stats = stats = outputs.stats
        for started in outputs.started:
            entry = entries.get(started.handle)
            if entry is not None:
                self._start(started.handle, entry)
                entry.stream.more().started.append(started)
        for pair in outputs.pairs():
            entry = entries.get(pair[0])
            if entry is not None:
                entry.num_tokens += 1
                events = entry.stream.events()
                events.tokens.append(pair)
                events.time = stats.time
        for row in outputs.logprobs:
            if (entry := entries.get(row.handle)) is not None:
                entry.stream.more().logprobs.append(row)
        for rows in outputs.prompt_logprobs:
            if (entry := entries.get(rows.handle)) is not None:
                entry.stream.more().prompt_logprobs.append(rows)
        for pooled in outputs.pooled:
            if (entry := entries.get(pooled.handle)) is not None:
                entry.stream.more().pooled.append(pooled)
        for finished in outputs.finished:
            if (entry := entries.get(finished.handle)) is not None:
                self._end(finished.handle, finished.reason)
                entry.stream.more().finished.append(finished)
        for rejected in outputs.rejected:
            if (entry := entries.get(rejected.handle)) is not None:
                for handle in range(entry.handle, entry.handle + entry.n):
                    if handle in entries:
                        self._end(handle, REJECTED)
                entry.stream.more().rejected.append(rejected)
        if stats.step_seconds:
            self._forecast.on_step(stats.step_seconds)
        if self.on_step is not None:
            self.on_step(stats)

    # ---- accounts ----

    def _start(self, handle: int, entry: _Entry) -> None:
        self._waiting.discard(handle)
        self._leave_queue(entry, started=True)

    def _end(self, handle: int, reason: str) -> None:
        entry = self._entries.pop(handle)
        self._waiting.discard(handle)
        self.ended[reason] += 1
        # Where at most one token could come (beams, vectors) nothing is learned of lengths.
        if entry.max_tokens > 1 and reason in (FinishReason.STOP, FinishReason.LENGTH):
            by_itself = reason == FinishReason.STOP
            self._forecast.on_end(entry.num_tokens // entry.n, by_itself)
        entry.num_open -= 1
        if not entry.num_open:
            self._leave_queue(entry, started=False)
        entry.stream.open.discard(handle)
        if not entry.stream.open:
            entry.stream.wake()

    def _leave_queue(self, entry: _Entry, started: bool) -> None:
        if entry.queued and self._gate is not None:
            entry.queued = False
            self._gate.leave(entry.num_prompt_tokens, time.monotonic(), started)

    def _fail_all(self, error: Exception) -> list[int]:
        handles = list(self._entries)
        for handle in handles:
            stream = self._entries[handle].stream
            stream.fail(error)
            self._end(handle, FinishReason.ERROR)
        for call in self._calls.values():
            if not call.done():
                call.set_exception(error)
        return handles

    # ---- health ----

    async def _watch_process(self, process: asyncio.subprocess.Process) -> None:
        code = await process.wait()
        self._read()  # it may have said why
        how = f"by signal {-code}" if code < 0 else f"with exit code {code}"
        if not (self._closing or (self.draining and code == 0 and not self._entries)):
            self._die(f"the engine process ended {how}")

    async def _watch_heartbeat(self) -> None:
        while not self._death:
            before = time.monotonic()
            await asyncio.sleep(CHECK_INTERVAL)
            now = time.monotonic()
            if self._info is None or now - before > CHECK_INTERVAL + 0.5:
                continue  # not loaded yet; or this process itself was held up: look again
            self._read()
            self._judge(now)

    def _judge(self, now: float) -> None:
        deadline = self.config.scheduler.step_deadline
        silence = now - self._last_beat
        if silence > max(deadline, HEARTBEAT_LIMIT):
            self._die(f"the engine has not answered for {silence:.1f} s (--step-deadline)")
        elif silence > HEARTBEAT_LIMIT:
            self._stalled = f"the engine has not answered for {silence:.1f} s"
            self.fail_all(EngineDead(self._stalled))
        elif self._step_age > deadline:
            self._die(
                f"a step has taken {self._step_age:.1f} s, above --step-deadline {deadline:g} s"
            )
        else:
            self._stalled = ""

    def _die(self, why: str, user_error: bool = False) -> None:
        if self._death:
            return
        self._death = why
        self._kill()
        error = ConfigError(why) if user_error else EngineDead(why)
        if not self._ready.done():
            self._ready.set_exception(error)
            self._ready.exception()  # it may be awaited later, or never
        self._fail_all(EngineDead(why))
        self.dead.set()

    def _kill(self) -> None:
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
