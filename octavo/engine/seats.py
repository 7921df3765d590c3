"""The engine process's side of the sockets: one inbox for all its clients, an outbox for each.

A client is an API process; client i has bound its own pair of sockets, ``inbox-i`` and
``outbox-i``, on this machine or another. Never imports torch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import zmq

from octavo.engine.messages import Message, Outputs, encoder
from octavo.wire import Wire

MOST_BEATS = 10  # kept for a client that does not read


class Seats:
    """``inboxes`` and ``outboxes``: the clients' addresses in order, joined by commas;
    ``secret``: what they and this process know, where they are on another machine."""

    def __init__(
        self, context: zmq.Context[Any], inboxes: str, outboxes: str, secret: bytes | None = None
    ) -> None:
        self._context = context
        self._wire = Wire(context, secret)
        self._addresses = outboxes.split(",")
        self.inbox: zmq.Socket[bytes] = context.socket(zmq.PULL)
        for address in inboxes.split(","):
            self._wire.connect(self.inbox, address)
        self._outboxes = {i: self._outbox(i) for i in range(len(self._addresses))}

    @property
    def directory(self) -> Path | None:
        """Of the first client's sockets, where they lie in one."""
        kind, _, path = self._addresses[0].partition("://")
        return Path(path).parent if kind == "ipc" else None

    def send(self, message: Message) -> None:
        """To all."""
        raw = encoder.encode(message)
        for outbox in self._outboxes.values():
            outbox.send(raw)

    def send_to(self, client: int, message: Message) -> None:
        if (outbox := self._outboxes.get(client)) is not None:
            outbox.send(encoder.encode(message))

    def send_outputs(self, outputs: Outputs) -> None:
        """Each client gets what is its own, and all get the statistics."""
        if len(self._addresses) == 1:
            self.send(outputs)
            return
        for client, outbox in self._outboxes.items():
            outbox.send(encoder.encode(outputs.of_client(client)))

    def take(self, client: int) -> None:
        """A client has connected, perhaps in place of one that has gone."""
        if client not in self._outboxes and client < len(self._addresses):
            self._outboxes[client] = self._outbox(client)

    def leave(self, client: int) -> None:
        """A client has gone: nothing more is kept for it."""
        if client in self._outboxes:
            self._outboxes.pop(client).close(linger=0)

    def beats(self) -> list[zmq.Socket[bytes]]:
        """A socket to each client, for the thread that calls this; what a client does not read is
        dropped."""
        return [self._outbox(i, MOST_BEATS) for i in range(len(self._addresses))]

    def _outbox(self, client: int, most: int = 0) -> zmq.Socket[bytes]:
        outbox: zmq.Socket[bytes] = self._context.socket(zmq.PUSH)
        outbox.setsockopt(zmq.SNDHWM, most)
        self._wire.connect(outbox, self._addresses[client])
        return outbox
