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
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import zmq

from octavo import __version__
from octavo.config import EngineConfig, cluster_secret
from octavo.engine.joining import (
    PING_SECONDS,
    End,
    Ended,
    FromHead,
    FromNode,
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


def serve(config: EngineConfig, path: Path, engine_command: Sequence[str] | None = None) -> int:
    """Runs until told to stop; returns the exit code. ``path``: of the model's files. Raises
    ConfigError for what the user can mend, the head's refusal among it."""
    return asyncio.run(_Node(config, path, engine_command or ENGINE_COMMAND).run())


class _Node:
    def __init__(self, config: EngineConfig, path: Path, command: Sequence[str]) -> None:
        self.config = config
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
        stop = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop.set)
        stopped = loop.create_task(stop.wait())
        tasks = [loop.create_task(_Slot(self, spec).run()) for spec in self.specs]
        try:
            done, _ = await asyncio.wait((stopped, *tasks), return_when=asyncio.FIRST_COMPLETED)
            for task in done & set(tasks):
                task.result()
            return 0
        finally:
            for task in (stopped, *tasks):
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self.wire.close()
            self.context.destroy(linger=0)


class _Slot:
    """One replica of the node, over all its engines."""

    def __init__(self, node: _Node, spec: ReplicaSpec) -> None:
        self._node, self._spec = node, spec
        self._restarts = Restarts()
        self._told = -TELL_SECONDS

    async def run(self) -> None:
        """For ever. Raises ConfigError where the head refuses it, or has told why the engine cannot
        run; NodeFailed where it dies again and again."""
        while True:
            socket = await self._dial()
            if socket is None:
                await asyncio.sleep(RETRY_SECONDS)
                continue
            stay = _Stay(self._node, self._spec, socket)
            try:
                await stay.run()
            finally:
                await stay.close()
            if stay.crashed:
                pause = self._restarts.pause(time.monotonic())
                if pause is None:
                    raise NodeFailed(f"the engine has died {self._restarts.num_recent} times")
                await asyncio.sleep(pause)

    async def _dial(self) -> zmq.Socket[bytes] | None:
        """None while the head is not there. Raises LinkError where it does not let us in."""
        node = self._node
        dialling = asyncio.ensure_future(
            asyncio.to_thread(node.wire.dial, zmq.DEALER, node.endpoint, CONNECT_SECONDS)
        )
        try:
            return await asyncio.shield(dialling)
        except LinkError as error:
            if error.refused:
                raise
            if time.monotonic() - self._told >= TELL_SECONDS:
                self._told = time.monotonic()
                logger.warning("%s; trying again", error)
            return None
        except asyncio.CancelledError:  # its thread has the socket, and gives it back in a moment
            (found,) = await asyncio.gather(dialling, return_exceptions=True)
            if isinstance(found, zmq.Socket):
                found.close(linger=0)
            raise


class _Stay:
    """One link to the head, and the engine that it is for."""

    def __init__(self, node: _Node, spec: ReplicaSpec, socket: zmq.Socket[bytes]) -> None:
        self._node, self._spec = node, spec
        self._inbox: asyncio.Queue[FromHead] = asyncio.Queue()
        self._heard = time.monotonic()
        self._limit = node.config.scheduler.step_deadline
        self._engine: Launched | None = None
        self._watch: asyncio.Task[str] | None = None
        self._index: int | None = None
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
            now = time.monotonic()
            self._mailbox.read()
            silence = now - self._heard
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

    async def close(self) -> None:
        """Tells the head, in case it is there, and leaves no process behind."""
        self._send(Leave())
        if self._engine is not None:
            await self._engine.end(END_SECONDS)
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
