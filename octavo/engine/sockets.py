"""A client's pair of sockets: where its engine finds them is the launcher's to say."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import zmq

from octavo.engine.launch import Launcher
from octavo.engine.messages import FromEngine, ToEngine, encoder, from_engine_decoder
from octavo.types import ConfigError, EngineDead

logger = logging.getLogger("octavo")


class ClientSockets:
    """``directory``: of the sockets; one that is not given is made, and removed at the end.
    ``take`` is called with each message, ``on_cut`` when a connection to another machine ends."""

    def __init__(
        self,
        launcher: Launcher,
        seat: int,
        directory: Path | None,
        take: Callable[[FromEngine], None],
        on_cut: Callable[[], None],
    ) -> None:
        """Binds both, in the running loop. Raises ConfigError where that cannot be done."""
        self._launcher, self._take, self._on_cut = launcher, take, on_cut
        self._owns_directory = directory is None
        self.directory = directory or Path(tempfile.mkdtemp(prefix="octavo-"))
        self._loop = asyncio.get_running_loop()
        self._context = zmq.Context()
        self._reads = False
        self._made: list[zmq.Socket[bytes]] = []
        try:
            self._outbox = self._bound(zmq.PUSH, f"inbox-{seat}")
            self._inbox = self._bound(zmq.PULL, f"outbox-{seat}")
        except ConfigError:
            self.close()
            raise
        except zmq.ZMQError as error:
            self.close()
            raise ConfigError(
                f"cannot make a socket in {self.directory}: {os.strerror(error.errno or 0)}; set "
                "TMPDIR to another directory"
            ) from None
        self._loop.add_reader(self._inbox.fileno(), self.read)
        self._reads = True

    def addresses(self, num_seats: int) -> tuple[str, str]:
        """Of the inboxes and the outboxes of all clients, as an engine is given them."""
        inboxes, outboxes = (
            ",".join(
                self._launcher.address(self.directory, f"{name}-{seat}")
                for seat in range(num_seats)
            )
            for name in ("inbox", "outbox")
        )
        return inboxes, outboxes

    def send(self, message: ToEngine) -> None:
        """Raises EngineDead while no engine is connected."""
        try:
            self._outbox.send(encoder.encode(message), zmq.NOBLOCK)
        except zmq.Again:
            raise EngineDead("the engine process has closed its connection") from None

    def read(self) -> None:
        """Reads all messages there are: ZMQ's descriptor is edge-triggered, so only an empty
        socket may end this. One message that cannot be handled does not cost the others."""
        while True:
            try:
                raw = self._inbox.recv(zmq.NOBLOCK)
            except zmq.ZMQError:
                return
            try:
                self._take(from_engine_decoder.decode(raw))
            except Exception:
                logger.exception("a message of %d bytes from the engine failed", len(raw))

    def close(self) -> None:
        if self._reads:
            self._loop.remove_reader(self._inbox.fileno())
        self._launcher.unbind()  # while the sockets that it watches are there
        for socket in self._made:
            socket.close(linger=0)
        self._context.term()
        if self._owns_directory:
            shutil.rmtree(self.directory, ignore_errors=True)

    def _bound(self, kind: int, name: str) -> zmq.Socket[bytes]:
        socket: zmq.Socket[bytes] = self._context.socket(kind)
        self._made.append(socket)
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.setsockopt(zmq.RCVHWM, 0)
        self._launcher.bind(socket, self.directory, name, self._on_cut)
        return socket
