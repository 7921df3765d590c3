"""Writes of all connections that fall into one turn of the event loop, sent one after the other.

A step of the engine gives a token to every stream at once. Sent as soon as each is ready, every one
of them wakes a client that then takes the cores from the streams still to come: measured on two
cores, such a write costs 40 µs, one of many in a row 17 µs, and the clients wake a tenth as often.
"""

from __future__ import annotations

import asyncio
from typing import Any

# Connections whose writes may wait for each other: bounds what the first waits for the last.
MOST_WAITING = 64


class WriteBatch:
    """The connections that have something to send. One per event loop."""

    def __init__(self) -> None:
        self._waiting: list[BatchedTransport] = []

    def add(self, transport: BatchedTransport) -> None:
        """Called once per connection and batch, with its first bytes."""
        if not self._waiting:
            # Runs after the tasks that are ready now, hence after all streams of an engine message.
            asyncio.get_running_loop().call_soon(self.flush)
        self._waiting.append(transport)
        if len(self._waiting) >= MOST_WAITING:
            self.flush()

    def flush(self) -> None:
        waiting, self._waiting = self._waiting, []
        for transport in waiting:
            transport.flush()


class BatchedTransport:
    """A connection's transport whose writes wait for the batch; all else is the transport's own."""

    __slots__ = ("_batch", "_pending", "_transport")

    def __init__(self, transport: asyncio.Transport, batch: WriteBatch) -> None:
        self._transport = transport
        self._batch = batch
        self._pending: list[bytes] = []

    def write(self, data: bytes) -> None:
        self._pending.append(data)
        if len(self._pending) == 1:
            self._batch.add(self)

    def flush(self) -> None:
        """Sends what waits; drops it when the connection has ended meanwhile."""
        pending, self._pending = self._pending, []
        if pending and not self._transport.is_closing():
            self._transport.write(pending[0] if len(pending) == 1 else b"".join(pending))

    def close(self) -> None:
        self.flush()
        self._transport.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)
