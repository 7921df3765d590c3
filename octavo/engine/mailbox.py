"""A ZMQ socket that is read in the running event loop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence

import zmq

logger = logging.getLogger("octavo")


class Mailbox:
    """``take`` gets the frames of every message that comes. The mailbox closes the socket."""

    def __init__(self, socket: zmq.Socket[bytes], take: Callable[[list[bytes]], None]) -> None:
        self._socket, self._take = socket, take
        self._loop = asyncio.get_running_loop()
        self._closed = False
        self._loop.add_reader(socket.fileno(), self.read)
        self._loop.call_soon(self.read)  # ZMQ's descriptor tells of changes only

    def send(self, frames: Sequence[bytes]) -> None:
        """What nobody can get is dropped."""
        if not self._closed:
            with contextlib.suppress(zmq.ZMQError):
                self._socket.send_multipart(frames, zmq.NOBLOCK)
            self._loop.call_soon(self.read)  # sending may have swallowed the news of a message

    def read(self) -> None:
        while not self._closed:
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.ZMQError:
                return
            try:
                self._take(frames)
            except Exception:
                logger.exception("a message between nodes failed")

    def close(self, linger_ms: int = 0) -> None:
        """``linger_ms``: for what was sent to leave."""
        if not self._closed:
            self._closed = True
            self._loop.remove_reader(self._socket.fileno())
            self._socket.close(linger=linger_ms)
