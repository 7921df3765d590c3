"""``octavo serve --headless``: the replicas of a node that join a head node.

For each replica a link to the head (engine.joining). An engine lives as long as its link does: when
the head has not been heard for --step-deadline the engine ends, and the node asks again, for ever.
Never imports torch.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import zmq

from octavo import __version__
from octavo.config import EngineConfig, cluster_secret
from octavo.engine.joining import (
    MOST_SILENCE,
    PING_SECONDS,
    End,
    Ended,
    FromHead,
    FromNode,
    Here,
    Join,
    Leave,
    Ping,
    Place,
    Pong,
    Refused,
    Running,
    Unknown,
    Wait,
    checkpoint_facts,
    encoder,
    from_head,
    on_node,
)
from octavo.engine.launch import ENGINE_COMMAND, Launched
from octavo.engine.mailbox import Mailbox
from octavo.engine.placement import local_replicas
from octavo.engine.replica import ReplicaSpec, Restarts
from octavo.types import ConfigError, OctavoError
from octavo.wire import LinkError, Wire

logger = logging.getLogger("octavo")

CONNECT_SECONDS = 3.0  # for one attempt
RETRY_SECONDS = 1.0  # between two
TELL_SECONDS = 30.0  # between two lines that say that the head is not there
END_SECONDS = 2.0  # for an engine to end by itself


class NodeFailed(OctavoError):
    """The engines of this node die again and again."""


def serve(config: EngineConfig, path: Path, drain_timeout: float) -> int:
    """Runs until told to stop, and then until the engines have finished what they have, at most
    ``drain_timeout`` seconds or a second signal; returns the exit code. ``path``: of the model's
    files. Raises ConfigError for what the user can mend, the head's refusal among it."""
    return asyncio.run(Node(config, path, drain_timeout).run())


class Node:
    """One run of ``serve``."""

    def __init__(
        self,
        config: EngineConfig,
        path: Path,
        drain_timeout: float = 0.0,
        command: Sequence[str] = ENGINE_COMMAND,
    ) -> None:
        self.config = config
        self._drain_timeout = drain_timeout
        self._stop, self._stop_now = asyncio.Event(), asyncio.Event()
        self.facts = checkpoint_facts(path, config.model.load_format != "dummy")
        self.specs = local_replicas(config, command)
        parallel = config.parallel
        host = parallel.data_parallel_address
        self.host = f"[{host}]" if ":" in host else host
        self.endpoint = f"tcp://{self.host}:{parallel.data_parallel_rpc_port}"
        self.context = zmq.Context()
        self.wire = Wire(self.context, cluster_secret(parallel.cluster_secret_file))

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.stop)
        stopped = loop.create_task(self._stop.wait())
        slots = [_Slot(self, spec) for spec in self.specs]
        tasks = [loop.create_task(slot.run()) for slot in slots]
        try:
            done, _ = await asyncio.wait((stopped, *tasks), return_when=asyncio.FIRST_COMPLETED)
            for task in done & set(tasks):
                task.result()
            for slot in slots:
                slot.leave()
            await self._drained(tasks)
            return 0
        finally:
            for task in (stopped, *tasks):
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self.wire.close()
            self.context.destroy(linger=0)

    def stop(self) -> None:
        """At the first call when the engines have finished what they have, at the second now."""
        if self._stop.is_set():
            self._stop_now.set()
        self._stop.set()

    async def _drained(self, tasks: list[asyncio.Task[None]]) -> None:
        async def all_ended() -> None:
            await asyncio.gather(*tasks)

        ended = asyncio.ensure_future(all_ended())
        now = asyncio.ensure_future(self._stop_now.wait())
        await asyncio.wait(
            (ended, now), timeout=self._drain_timeout, return_when=asyncio.FIRST_COMPLETED
        )
        now.cancel()
        ended.cancel()
        await asyncio.gather(now, ended, return_exceptions=True)


class _Slot:
    """One replica of the node, over all its engines."""

    def __init__(self, node: Node, spec: ReplicaSpec) -> None:
        self._stay: _Stay | None = None
        self._leaving = False
        self._node, self._spec = node, spec
        self._restarts = Restarts()
        self._told = -TELL_SECONDS

    async def run(self) -> None:
        """For ever. Raises ConfigError where the head refuses it, or has told why the engine cannot
        run; NodeFailed where it dies again and again."""
        while not self._leaving:
            socket = await self._dial()
            if socket is None:
                await asyncio.sleep(RETRY_SECONDS)
                continue
            stay = self._stay = _Stay(self._node, self._spec, socket)
            try:
                if not self._leaving:
                    await stay.run()
            finally:
                self._stay = None
                await stay.close()
            if stay.crashed:
                pause = self._restarts.pause(time.monotonic())
                if pause is None:
                    raise NodeFailed(f"the engine has died {self._restarts.num_recent} times")
                await asyncio.sleep(pause)

    def leave(self) -> None:
        """Ends when the engine has finished what it has."""
        self._leaving = True
        if self._stay is not None:
            self._stay.leave()

    async def _dial(self) -> zmq.Socket[bytes] | None:
        """None while the head is not there. Raises LinkError where it does not let us in."""
        node = self._node
        link: zmq.Socket[bytes] = node.context.socket(zmq.DEALER)
        # Its own name: the head knows it again when the connection has been cut and is made again.
        link.routing_id = b"n" + uuid.uuid4().bytes
        dialling = asyncio.ensure_future(
            asyncio.to_thread(node.wire.connect, link, node.endpoint, CONNECT_SECONDS)
        )
        try:
            await asyncio.shield(dialling)
            return link
        except LinkError as error:
            link.close(linger=0)
            if error.refused:
                raise
            if time.monotonic() - self._told >= TELL_SECONDS:
                self._told = time.monotonic()
                logger.warning("%s; trying again", error)
            return None
        except asyncio.CancelledError:  # its thread has the socket, and gives it back in a moment
            await asyncio.gather(dialling, return_exceptions=True)
            link.close(linger=0)
            raise


class _Stay:
    """One link to the head, and the engine that it is for."""

    def __init__(self, node: Node, spec: ReplicaSpec, socket: zmq.Socket[bytes]) -> None:
        self._node, self._spec = node, spec
        self._inbox: asyncio.Queue[FromHead] = asyncio.Queue()
        self._heard = time.monotonic()
        self._limit = node.config.scheduler.step_deadline
        self._engine: Launched | None = None
        self._watch: asyncio.Task[str] | None = None
        self._index: int | None = None
        self._leaving = False
        self.crashed = False
        self._mailbox = Mailbox(socket, self._take)

    async def run(self) -> None:
        """Until the engine has ended, or the head is gone."""
        raw = msgspec.msgpack.encode(self._spec.config)
        self._send(Join(__version__, socket.gethostname(), self._node.facts, raw))
        while True:
            message = await self._next()
            if message is None:
                return
            match message:
                case Refused():
                    raise ConfigError(f"the head node {self._node.endpoint}: {message.why}")
                case Wait():
                    logger.info("standing by: %s", message.why)
                case Place():
                    await self._start(message)
                case End():
                    if message.user_error:
                        raise ConfigError(f"the head node has ended the engine: {message.why}")
                    logger.warning("the head has ended the engine: %s", message.why)
                    await self._end(message.grace)
                    return
                case Unknown():
                    logger.warning("the head does not know this node any more: joining again")
                    return

    async def _next(self) -> FromHead | None:
        """The head's next message; None once there is none to wait for, which is logged."""
        while True:
            asking = asyncio.ensure_future(self._inbox.get())
            waiting: set[asyncio.Future[Any]] = {asking}
            if self._watch is not None:
                waiting.add(self._watch)
            before = time.monotonic()
            await asyncio.wait(waiting, timeout=PING_SECONDS, return_when=asyncio.FIRST_COMPLETED)
            if asking.done():
                return asking.result()
            asking.cancel()
            if self._watch is not None and self._watch.done():
                how = self._watch.result()
                self.crashed = bool(how)
                logger.log(
                    logging.ERROR if how else logging.INFO,
                    "the engine has ended %s",
                    how or "cleanly",
                )
                self._send(Ended(how))
                return None
            self._mailbox.read()
            now = time.monotonic()
            silence = now - self._heard
            if silence > 2 * PING_SECONDS:
                self._send(Here())
            if self._leaving and (self._watch is None or silence > MOST_SILENCE):
                return None
            if silence > self._limit and now - before < 2 * PING_SECONDS:
                logger.warning("the head has not been heard for %.1f s: joining again", silence)
                return None

    async def _start(self, place: Place) -> None:
        config = on_node(msgspec.msgpack.decode(place.config, type=EngineConfig), self._spec.config)
        self._limit = config.scheduler.step_deadline
        self._index = place.index
        logger.info("starting replica %d, for %s", place.index, self._node.endpoint)
        here = f"tcp://{self._node.host}:"
        inboxes, outboxes = (
            addresses.replace("tcp://*:", here) for addresses in (place.inboxes, place.outboxes)
        )
        self._engine = await self._spec.launcher.launch(inboxes, outboxes, config)
        self._watch = asyncio.ensure_future(self._engine.wait())
        self._send(Running(self._engine.pid))

    async def _end(self, grace: float) -> None:
        if self._engine is not None:
            if grace:
                await self._engine.end(grace)
            self._engine.kill()
            assert self._watch is not None
            self._send(Ended(await self._watch))

    def leave(self) -> None:
        self._leaving = True
        self._send(Leave())

    async def close(self) -> None:
        """Tells the head, in case it is there, and leaves no process behind."""
        if self._engine is not None and self._watch is not None and not self._watch.done():
            await self._engine.end(END_SECONDS)
            self._send(Ended("as its node has stopped"))
        self._send(Leave())
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.gather(self._watch, return_exceptions=True)
        self._mailbox.close(linger_ms=500)

    def _take(self, frames: list[bytes]) -> None:
        self._heard = time.monotonic()
        message = from_head.decode(frames[-1])
        if isinstance(message, Ping):
            self._send(Pong(message.sent, time.monotonic()))
        else:
            self._inbox.put_nowait(message)

    def _send(self, message: FromNode) -> None:
        self._mailbox.send([encoder.encode(message)])
