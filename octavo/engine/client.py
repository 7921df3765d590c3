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
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import zmq

from octavo.config import EngineConfig
from octavo.engine.accounts import Accounts
from octavo.engine.child import EngineChild
from octavo.engine.health import Health
from octavo.engine.messages import (
    CLIENT_SHIFT,
    REJECTED,
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
CHECK_INTERVAL = 0.25


@dataclass(frozen=True)
class Seat:
    """Which of an engine's clients this is. The first one starts the engine, and judges it; the
    others are given the directory of the sockets."""

    index: int = 0
    count: int = 1
    directory: Path | None = None


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
        self.draining = False
        self.on_step: Callable[[EngineStats], None] | None = None
        self._command = list(command)
        self._on_progress = on_progress
        self._info: EngineInfo | None = None
        self._accounts = Accounts(config.scheduler, seat.count)
        self._health = Health(config.scheduler.step_deadline)
        self.seat = seat
        self._next_handle = (seat.index << CLIENT_SHIFT) + 1
        self._child: EngineChild | None = None
        self._calls: dict[int, asyncio.Future[bool]] = {}
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
        inboxes, outboxes = (
            ",".join(self._address(name, index) for index in range(self.seat.count))
            for name in ("inbox", "outbox")
        )
        self._child = await EngineChild.start(self._command, inboxes, outboxes, self.config)
        self._tasks.append(self._loop.create_task(self._watch_child(self._child)))

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
        assert self._child is not None
        return self._child.pid

    @property
    def alive(self) -> bool:
        return not self._health.death

    def problem(self) -> str | None:
        """Why the engine cannot serve now, or None when it makes progress."""
        if self._health.death or self._health.stalled:
            return self._health.death or self._health.stalled
        return None if self._info is not None else "the model is still loading"

    async def close(self, grace: float = 2.0) -> None:
        """Ends the process (killing it after ``grace`` seconds) and removes the sockets."""
        self._closing = True
        self._fail_all(EngineDead("the server is shutting down"))
        if self._child is not None:
            await self._child.end(grace)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._loop.remove_reader(self._inbox.fileno())
        self._inbox.close(linger=0)
        self._outbox.close(linger=0)
        self._context.term()
        if self.seat.index == 0:
            shutil.rmtree(self.directory, ignore_errors=True)

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
    def most_queued(self) -> int:
        """How many requests may wait in this client. Raises EngineDead as ``submit`` does."""
        self._require_ready()
        return self._accounts.gate.max_requests

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
        handles = [r.handle + i for r in requests for i in range(r.params.n)]
        stream = RequestStream(self._loop, handles)
        for request in requests:
            self._send(request)
            self._accounts.enter(request, stream)
        return stream

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
        if not self._health.death:
            with contextlib.suppress(EngineDead):
                self._send(Abort(handles=known))

    def fail_all(self, error: Exception) -> None:
        """Ends every open stream with ``error`` and frees their requests in the engine."""
        handles = self._fail_all(error)
        if handles and not self._health.death:
            with contextlib.suppress(EngineDead):
                self._send(Abort(handles=handles))

    async def reset_prefix_cache(self) -> bool:
        """Whether the cache could be emptied (not while requests hold blocks of it)."""
        self._require_ready()
        call = self.allocate(1)
        self._calls[call] = self._loop.create_future()
        try:
            self._send(ResetPrefixCache(call=call))
            return await self._calls[call]
        finally:
            del self._calls[call]

    def send_vocabulary(self, vocabulary: Vocabulary) -> None:
        """Before the first request with a grammar."""
        if not self._health.death:
            with contextlib.suppress(EngineDead):
                self._send(SetVocabulary(vocabulary))

    def drain(self) -> None:
        """Nothing new is taken from now on; the process ends after its last output."""
        if self.draining:
            return
        self.draining = True
        # With several clients the engine is ended by the first one, when all have drained.
        if self._info is not None and not self._health.death and self.seat.count == 1:
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

    def _require_ready(self) -> None:
        if self.draining:
            raise EngineDead("the server is shutting down")
        if problem := self.problem():
            raise EngineDead(problem)

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
            self._health.hear(message)
        elif isinstance(message, Progress):
            if self._on_progress:
                self._on_progress(message)
        elif isinstance(message, Ready) and self._info is None:
            self._info = message.info
            self._accounts.begin(message.info.max_num_seqs)
            self._health.begin(time.monotonic())
            if not self._ready.done():
                self._ready.set_result(message.info)
        elif isinstance(message, PrefixCacheReset):
            call = self._calls.get(message.call)
            if call is not None and not call.done():
                call.set_result(message.success)
        elif isinstance(message, Failed):
            self._die(message.message, message.user_error)

    def _fan_out(self, outputs: Outputs) -> None:
        accounts, entries = self._accounts, self._accounts.entries
        self.stats = stats = outputs.stats
        for started in outputs.started:
            entry = entries.get(started.handle)
            if entry is not None:
                accounts.start(started.handle, entry)
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
                accounts.end(finished.handle, finished.reason)
                entry.stream.more().finished.append(finished)
        for rejected in outputs.rejected:
            if (entry := entries.get(rejected.handle)) is not None:
                for handle in range(entry.handle, entry.handle + entry.n):
                    if handle in entries:
                        accounts.end(handle, REJECTED)
                entry.stream.more().rejected.append(rejected)
        if stats.step_seconds:
            accounts.forecast.on_step(stats.step_seconds)
        if self.on_step is not None:
            self.on_step(stats)

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

    async def _watch_child(self, child: EngineChild) -> None:
        code = await child.wait()
        self._read()  # it may have said why
        how = f"by signal {-code}" if code < 0 else f"with exit code {code}"
        if not (self._closing or (self.draining and code == 0 and not self.num_open)):
            self._die(f"the engine process ended {how}")

    async def _watch_heartbeat(self) -> None:
        while not self._health.death:
            before = time.monotonic()
            await asyncio.sleep(CHECK_INTERVAL)
            now = time.monotonic()
            if self._info is None or now - before > CHECK_INTERVAL + 0.5:
                continue  # not loaded yet; or this process itself was held up: look again
            self._read()
            self._judge(now)

    def _judge(self, now: float) -> None:
        if fault := self._health.judge(now):
            self._die(fault)
        elif self._health.stalled:
            self.fail_all(EngineDead(self._health.stalled))

    def _die(self, why: str, user_error: bool = False) -> None:
        if self._health.death:
            return
        self._health.death = why
        if self._child is not None:
            self._child.kill()
        error = ConfigError(why) if user_error else EngineDead(why)
        if not self._ready.done():
            self._ready.set_exception(error)
            self._ready.exception()  # it may be awaited later, or never
        self._fail_all(EngineDead(why))
        self.dead.set()
