"""The head node's side of joining: who may come in, which place it gets, and whether it is there.

``Door`` listens at --data-parallel-rpc-port; each place that other nodes may take is a ``Launcher``
(engine.launch) whose ``launch`` waits for a node. Lives in the API process; never imports torch.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import socket as sockets
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message

from octavo import __version__
from octavo.config import EngineConfig, cluster_secret
from octavo.engine.clocks import ClockOffset
from octavo.engine.joining import (
    MOST_SILENCE,
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
    check_same_checkpoint,
    common_config,
    encoder,
    from_node,
)
from octavo.engine.mailbox import Mailbox
from octavo.engine.placement import part
from octavo.engine.replica import ReplicaSpec
from octavo.types import ConfigError, EngineDead
from octavo.wire import Connections, Wire, session_secret

logger = logging.getLogger("octavo")


class Guest:
    """One replica of another node, from its Join until it is given up."""

    def __init__(self, door: Door, link: bytes, host: str, config: EngineConfig) -> None:
        self.host, self.config = host, config
        self.clock = ClockOffset()
        self.heard = time.monotonic()
        self.pid = 0
        self.told = False  # that it has to wait
        self.leaves = asyncio.Event()
        self.running = asyncio.Event()  # or gone
        self.gone: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._door, self._link = door, link

    def send(self, message: FromHead) -> None:
        self._door.send(self._link, message)

    def take(self, message: FromNode, now: float) -> None:
        self.heard = now
        match message:
            case Pong():
                self.clock.measure(message.sent, message.now, now)
            case Running():
                self.pid = message.pid
                self.running.set()
            case Ended():
                self.part(message.how)
            case Leave():
                self.leaves.set()

    def part(self, how: str) -> None:
        """It is no longer a guest. ``how``: "" after a clean end."""
        if not self.gone.done():
            self.gone.set_result(how)
        self.running.set()
        self._door.forget(self._link)


class RemoteEngine:
    """An engine of another node (``Launched``)."""

    def __init__(self, guest: Guest) -> None:
        self._guest = guest

    @property
    def pid(self) -> int:
        return self._guest.pid

    @property
    def clock_offset(self) -> float:
        return self._guest.clock.seconds

    async def wait(self) -> str:
        return await asyncio.shield(self._guest.gone)

    async def leaving(self) -> None:
        await self._guest.leaves.wait()

    def kill(self, why: str = "", user_error: bool = False) -> None:
        if not self._guest.gone.done():
            self._guest.send(End(why or "the head has ended it", user_error=user_error))
            self._guest.part("as it was told to")

    async def end(self, grace: float) -> None:
        if self._guest.gone.done():
            return
        self._guest.send(End("the server has ended", grace))
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.wait(), grace + 1.0)
        self._guest.part("as it was told to")


class Door:
    """Takes joining nodes in. ``facts``: of the head's checkpoint (``checkpoint_facts``)."""

    def __init__(
        self, config: EngineConfig, facts: dict[str, str], secret: bytes | None = None
    ) -> None:
        """Listens. ``secret``: where it is not the configuration's. Raises ConfigError where the
        ports cannot be had, or lack a secret."""
        parallel = config.parallel
        self._config, self._facts = config, facts
        self.secret = secret or cluster_secret(parallel.cluster_secret_file)
        self._context = zmq.Context()
        self._wire = Wire(self._context, self.secret)
        host, port = parallel.data_parallel_address, parallel.data_parallel_rpc_port
        if parallel.joined_everywhere:
            host = "0.0.0.0"
        self.host = f"[{host}]" if ":" in host else host
        self._guests: dict[bytes, Guest] = {}
        self._placed: dict[bytes, Guest] = {}
        self._places: list[asyncio.Future[Guest]] = []  # that wait for a node
        self._mailbox: Mailbox | None = None
        self._ticks: asyncio.Task[None] | None = None
        socket = self._context.socket(zmq.ROUTER)
        socket.router_handover = True  # a node that connects again is the same one
        try:
            self.endpoint = self._wire.bind(socket, f"tcp://{self.host}:{port}")
            self.launchers = [
                JoinLauncher(self, self._ports_of(port, place), place)
                for place in range(parallel.num_joining)
            ]
        except ConfigError:
            socket.close(linger=0)
            self._wire.close()
            self._context.term()
            raise
        self._socket = socket

    def _ports_of(self, port: int, place: int) -> dict[str, int]:
        """Of the sockets of the engine in that place, by name."""
        ports = {"inbox-0": 0, "outbox-0": 0}
        if port:
            ports = {"inbox-0": port + 1 + 2 * place, "outbox-0": port + 2 + 2 * place}
            for number in ports.values():
                _check_free(self.host, number)
        return ports

    def specs(self) -> list[ReplicaSpec]:
        """The replicas that join."""
        first = self._config.parallel.num_local
        return [
            ReplicaSpec(part(self._config, first + launcher.index), launcher, joins=True)
            for launcher in self.launchers
        ]

    def start(self) -> None:
        """In the event loop that all the rest runs in."""
        self._mailbox = Mailbox(self._socket, self._take)
        self._ticks = asyncio.get_running_loop().create_task(self._tick())
        logger.info(
            "replicas of other nodes can join at %s (%s)",
            self.endpoint, "with the cluster's secret" if self.secret else "this machine alone",
        )  # fmt: skip

    async def close(self) -> None:
        if self._ticks is not None:
            self._ticks.cancel()
            await asyncio.gather(self._ticks, return_exceptions=True)
        for guest in list(self._guests.values()):
            guest.send(End("the server has ended"))
        if self._mailbox is not None:
            self._mailbox.close(linger_ms=500)
        else:
            self._socket.close(linger=0)
        self._wire.close()
        self._context.term()

    def send(self, link: bytes, message: FromHead) -> None:
        if self._mailbox is not None:
            self._mailbox.send([link, encoder.encode(message)])

    def forget(self, link: bytes) -> None:
        self._guests.pop(link, None)
        self._placed.pop(link, None)

    # ---- places ----

    async def take_place(self) -> Guest:
        """Waits for a node."""
        place: asyncio.Future[Guest] = asyncio.get_running_loop().create_future()
        self._places.append(place)
        self._match()
        try:
            return await place
        finally:
            if place in self._places:
                self._places.remove(place)

    def _match(self) -> None:
        """Gives free places to those who wait for one, in order of arrival."""
        for link, guest in list(self._guests.items()):
            if not self._places:
                return
            if link not in self._placed and guest.clock.known and not guest.leaves.is_set():
                self._placed[link] = guest
                self._places.pop(0).set_result(guest)

    # ---- messages ----

    def _take(self, frames: list[bytes]) -> None:
        link, raw = frames
        try:
            message = from_node.decode(raw)
        except msgspec.DecodeError as error:
            self.send(link, Refused(f"the head (octavo {__version__}) cannot read this: {error}"))
            return
        if isinstance(message, Join):
            self._let_in(link, message)
        elif (guest := self._guests.get(link)) is not None:
            guest.take(message, time.monotonic())
            self._match()
        elif not isinstance(message, Ended | Leave):
            self.send(link, Unknown())

    def _let_in(self, link: bytes, join: Join) -> None:
        try:
            if join.version != __version__:
                raise ConfigError(
                    f"this node has octavo {join.version}, the head {__version__}: install the same"
                )
            check_same_checkpoint(self._facts, join.facts)
            node = msgspec.msgpack.decode(join.config, type=EngineConfig)
            config = common_config(self._config, node)
        except (ConfigError, msgspec.DecodeError) as error:
            logger.warning("a node that wanted to join, %s, is refused: %s", join.host, error)
            self.send(link, Refused(str(error)))
            return
        guest = self._guests[link] = Guest(self, link, join.host, config)
        if not self._places:
            self._make_room()
        guest.send(Ping(time.monotonic()))  # its answer makes the clock known, and gives a place

    def _make_room(self) -> None:
        """One that has long been silent loses its place to one that is there."""
        now = time.monotonic()
        silent = [guest for guest in self._placed.values() if now - guest.heard > MOST_SILENCE]
        if silent:
            guest = min(silent, key=lambda guest: guest.heard)
            guest.part(f"as its node was not heard for {now - guest.heard:.1f} s")

    async def _tick(self) -> None:
        limit = max(MOST_SILENCE, self._config.scheduler.step_deadline)
        while True:
            before = time.monotonic()
            await asyncio.sleep(PING_SECONDS)
            now = time.monotonic()
            assert self._mailbox is not None
            self._mailbox.read()
            for link, guest in list(self._guests.items()):
                # Where this process itself was held up, it looks again next time.
                if now - guest.heard > limit and now - before < 2 * PING_SECONDS:
                    guest.part(f"as its node was not heard for {now - guest.heard:.1f} s")
                else:
                    guest.send(Ping(time.monotonic()))
                    if link not in self._placed and not guest.told:
                        guest.told = True
                        guest.send(Wait(f"all {len(self.launchers)} places are taken"))


class JoinLauncher:
    """A place for a replica of another node (``Launcher``). ``ports``: for its sockets here."""

    def __init__(self, door: Door, ports: dict[str, int], index: int) -> None:
        self._door, self._ports = door, ports
        self.index = index
        self._guest: Guest | None = None
        self._endpoints: dict[str, str] = {}
        self._wire: Wire | None = None
        self._session = ""  # a new one for each engine
        self._monitors: list[tuple[zmq.Socket[Any], zmq.Socket[bytes]]] = []

    @property
    def place(self) -> str:
        if self._guest is None or self._guest.gone.done():
            return "another node, which has not joined yet"
        return f"node {self._guest.host}"

    def bind(
        self, socket: zmq.Socket[Any], directory: Path, name: str, on_cut: Callable[[], None]
    ) -> None:
        if self._wire is None:
            self._session = secrets.token_hex(16)
            secret = session_secret(self._door.secret, self._session)
            self._wire = Wire(socket.context, secret)
        address = f"tcp://{self._door.host}:{self._ports[name]}"
        self._endpoints[name] = self._wire.bind(socket, address)
        monitor = socket.get_monitor_socket(Connections.EVENTS)
        self._monitors.append((socket, monitor))
        connections = Connections()

        def look() -> None:
            while not monitor.closed and monitor.poll(0):
                message = recv_monitor_message(monitor)
                if connections.take(message["event"], message["value"]):
                    on_cut()

        asyncio.get_running_loop().add_reader(monitor.fileno(), look)
        asyncio.get_running_loop().call_soon(look)

    def unbind(self) -> None:
        for socket, monitor in self._monitors:
            asyncio.get_running_loop().remove_reader(monitor.fileno())
            socket.disable_monitor()  # first: it would wait for its reader
            monitor.close(linger=0)
        self._monitors = []
        if self._wire is not None:
            self._wire.close()
            self._wire = None

    def address(self, directory: Path, name: str) -> str:
        """Where the head listens at more than one address, the node knows which it can reach."""
        endpoint = self._endpoints[name]
        everywhere = self._door.host in ("0.0.0.0", "*", "[::]")
        return f"tcp://*:{endpoint.rpartition(':')[2]}" if everywhere else endpoint

    async def launch(self, inboxes: str, outboxes: str, config: EngineConfig) -> RemoteEngine:
        guest = self._guest = await self._door.take_place()
        scheduler = replace(  # the queue is the head's, divided among all places
            guest.config.scheduler,
            max_num_queued_reqs=config.scheduler.max_num_queued_reqs,
            max_num_queued_tokens=config.scheduler.max_num_queued_tokens,
        )
        own = replace(guest.config, scheduler=scheduler)
        number = config.parallel.replica
        parallel = replace(own.parallel, replica=number, session=self._session)
        own = replace(own, parallel=parallel)
        raw = msgspec.msgpack.encode(own)
        guest.send(Place(number, inboxes, outboxes, raw))
        try:
            await guest.running.wait()
        except asyncio.CancelledError:
            RemoteEngine(guest).kill("the server has ended")
            raise
        if guest.gone.done():
            raise EngineDead(f"node {guest.host} could not start it ({guest.gone.result()})")
        logger.info("node %s joins as replica %d", guest.host, number)
        return RemoteEngine(guest)


def _check_free(host: str, port: int) -> None:
    """Raises ConfigError where the port is not."""
    where = "" if host == "*" else host.strip("[]")
    family = sockets.AF_INET6 if ":" in where else sockets.AF_INET
    with sockets.socket(family, sockets.SOCK_STREAM) as probe:
        probe.setsockopt(sockets.SOL_SOCKET, sockets.SO_REUSEADDR, 1)
        try:
            probe.bind((where, port))
        except (OSError, OverflowError) as error:
            raise ConfigError(
                f"port {port} on {host}, behind --data-parallel-rpc-port, cannot be had: {error}; "
                "choose another with --data-parallel-rpc-port"
            ) from None
