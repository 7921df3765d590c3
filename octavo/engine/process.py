"""The engine process: an Engine behind two ZMQ sockets.

    python -m octavo.engine.process INBOXES OUTBOXES PARENT_PID   < msgpack EngineConfig

Sends Progress while loading, then Ready or Failed; then Outputs after each step and a Heartbeat
every half second from a thread of its own. ``--model`` must be a local path by now.
"""

from __future__ import annotations

import contextlib
import logging
import signal
import sys
import threading
import time

import msgspec
import zmq

from octavo import collector, logs
from octavo.config import EngineConfig, cluster_secret
from octavo.engine.engine import Executor
from octavo.engine.messages import (
    CLIENT_SHIFT,
    Abort,
    AddRequest,
    Bye,
    Drain,
    Failed,
    Heartbeat,
    Hello,
    Message,
    Outputs,
    PrefixCacheReset,
    Progress,
    Ready,
    ResetPrefixCache,
    SetVocabulary,
    ToEngine,
    encoder,
    to_engine_decoder,
)
from octavo.engine.seats import Seats
from octavo.engine.watchdog import LATE_SHARE, Watchdog
from octavo.machine import process_age
from octavo.parent import die_with_parent
from octavo.types import ConfigError, EngineDead
from octavo.wire import session_secret

logger = logging.getLogger(__name__)

HEARTBEAT_SECONDS = 0.5
IDLE_POLL_MS = 500
TICK_SECONDS = 1.0  # within which a loop without work comes round


class Heart(threading.Thread):
    """Tells the client every half second that this process lives, and how old its step is."""

    def __init__(self, seats: Seats, loop: EngineLoop) -> None:
        super().__init__(name="heartbeat", daemon=True)
        self._seats, self._loop = seats, loop
        self._watchdog = Watchdog(loop.step_deadline, lambda: loop.engine.under_way())
        self._stopped = threading.Event()

    def run(self) -> None:
        with contextlib.ExitStack() as stack:
            sockets = [stack.enter_context(socket) for socket in self._seats.beats()]
            self._beat(sockets)
            while not self._stopped.wait(HEARTBEAT_SECONDS):
                self._beat(sockets)

    def stop(self) -> None:
        """Its socket must be closed by its own thread, before the context ends."""
        self._stopped.set()
        self._watchdog.stop()
        self.join(HEARTBEAT_SECONDS)

    def _beat(self, sockets: list[zmq.Socket[bytes]]) -> None:
        now = time.monotonic()
        started = self._loop.engine.step_started
        age = now - started if started is not None else 0.0
        self._watchdog.look(age or self._loop.pause(now))
        step = self._loop.engine.scheduler.counters.steps
        beat = encoder.encode(Heartbeat(now, step, age, self._loop.problem))
        for socket in sockets:
            with contextlib.suppress(zmq.Again):
                socket.send(beat, zmq.NOBLOCK)


def engine_secret(config: EngineConfig) -> bytes:
    """Of the sockets of an engine that has joined a head node."""
    parallel = config.parallel
    return session_secret(cluster_secret(parallel.cluster_secret_file), parallel.session)


class EngineLoop:
    """Drain the inbox, step, send; until drained."""

    def __init__(self, config: EngineConfig, inboxes: str, outboxes: str) -> None:
        self._context = zmq.Context()
        remote = inboxes.startswith("tcp:")
        secret = engine_secret(config) if remote else None
        self._seats = Seats(self._context, inboxes, outboxes, secret)
        self._inbox = self._seats.inbox
        self._config = config
        self._heart: Heart | None = None
        self._executor: Executor | None = None
        self._draining = False
        self._number = time.time_ns()
        self._ticked = time.monotonic()  # when the loop last began anew
        self.step_deadline = config.scheduler.step_deadline

    def start(self) -> None:
        """Loads the model and says Ready. Raises ConfigError for what the user can mend."""
        from octavo.engine.start import start_engine

        age = process_age()  # this interpreter, and all it has imported
        self.engine, executor = start_engine(
            self._config,
            lambda *news: self._send(Progress(*news)),
            self._seats.directory,
        )
        self._executor = executor
        info = self.engine.info
        read = process_age() - age - sum(info.startup_seconds.values())  # configuration, tokenizer
        first = {"engine process": age, "model's configuration": max(0.0, read)}
        info.startup_seconds = {**first, **info.startup_seconds}
        self._send(self._ready())
        self._send(Outputs(self.engine.stats()))  # what is left to do in idle moments
        self._ticked = time.monotonic()
        self._heart = Heart(self._seats, self)
        self._heart.start()

    def run(self) -> None:
        while not (self._draining and not self.engine.has_work):
            self._ticked = time.monotonic()
            busy = self.engine.has_work or self._use_idle_moment()
            if not self._read_inbox(wait_ms=0 if busy else IDLE_POLL_MS) and not busy:
                self.engine.grammars.build()  # it takes a moment, and nobody is waiting now
            outputs = self.engine.step()
            if outputs is not None:
                self._seats.send_outputs(outputs)
        assert self._executor is not None
        self._executor.shutdown()

    def pause(self, now: float) -> float:
        """Seconds for which the loop has not come round, though it waits for no step."""
        since = now - self._ticked
        return since if self.engine.step_started is None and since > TICK_SECONDS else 0.0

    def fail(self, error: BaseException) -> None:
        user_error = isinstance(error, ConfigError)
        told = user_error or isinstance(error, EngineDead)
        text = str(error) if told else f"{type(error).__name__}: {error}"
        self._send(Failed(text, user_error))

    @property
    def problem(self) -> str:
        """What keeps the engine from going on, though its step may not be late."""
        pause = self.pause(time.monotonic())
        if pause > self.step_deadline * LATE_SHARE:
            return f"the engine has done nothing for {pause:.1f} s; its stacks are in the log"
        return self._executor.problem if self._executor is not None else ""

    def close(self) -> None:
        """Sends what is queued, for at most two seconds."""
        if self._executor is not None:
            self._executor.abandon()
        if self._heart is not None:
            self._heart.stop()
        self._context.destroy(linger=2000)

    def _use_idle_moment(self) -> bool:
        """Tells how much is left to do in such moments; False when that is nothing."""
        assert self._executor is not None
        if not self._executor.idle():
            return False
        self._send(Outputs(self.engine.stats()))
        return True

    def _ready(self) -> Ready:
        return Ready(self.engine.info, self._number)

    def _send(self, message: Message) -> None:
        self._seats.send(message)

    def _read_inbox(self, wait_ms: int) -> bool:
        """False when nothing came."""
        if wait_ms and not self._inbox.poll(wait_ms):
            return False
        num_read = 0
        while True:
            try:
                raw = self._inbox.recv(zmq.NOBLOCK)
            except zmq.Again:
                return num_read > 0
            num_read += 1
            self._handle(to_engine_decoder.decode(raw))

    def _handle(self, message: ToEngine) -> None:
        match message:
            case AddRequest():
                self.engine.add(message)
            case SetVocabulary():
                self.engine.grammars.set_vocabulary(message.vocabulary)
            case Abort():
                self.engine.abort(message.handles)
            case ResetPrefixCache():
                done = self.engine.reset_prefix_cache()
                client = message.call >> CLIENT_SHIFT
                self._seats.send_to(client, PrefixCacheReset(message.call, done))
            case Hello():
                self._seats.take(message.client)
                self._seats.send_to(message.client, self._ready())
            case Bye():
                self._seats.leave(message.client)
                self.engine.abort_client(message.client)
            case Drain():
                self._draining = True


def main() -> int:
    inbox, outbox, parent = sys.argv[1:4]
    die_with_parent(int(parent))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    config = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=EngineConfig)
    several = config.parallel.data_parallel_size > 1
    name = f"engine {config.parallel.replica}" if several else "engine"
    logs.configure_process(config.log_format, name, sys.stderr)
    if config.parallel.nnodes > 1:  # on this host ranks end with this process
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    loop = EngineLoop(config, inbox, outbox)
    try:
        loop.start()
        collector.settle()
        loop.run()
    except Exception as error:
        if not isinstance(error, ConfigError | EngineDead):  # which say all there is to say
            logger.exception("the engine cannot go on")
        loop.fail(error)
        return 2 if isinstance(error, ConfigError) else 1
    finally:
        loop.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
