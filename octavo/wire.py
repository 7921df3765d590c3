"""ZMQ sockets between hosts: TCP, encrypted, and open only to those who know the cluster's secret.

Both ends derive the same CURVE key pairs (https://rfc.zeromq.org/spec/26) from the secret: the one
that listens, and the one key that it lets in. Nothing of the secret crosses the network. A peer
that is cut off is noticed within ``SILENCE_MS``, and connected to again when it is back.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket as sockets
import time
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import zmq
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

from octavo.config import CLUSTER_SECRET_REMEDY
from octavo.types import ConfigError

Socket = zmq.Socket[bytes]

PING_MS = 500  # between two pings of a connection
SILENCE_MS = 2000  # without an answer, after which a connection is given up
CONNECT_MS = 2000  # for one attempt to connect
RECONNECT_MS = 100, 1000  # between two attempts, at first and at most
HANDSHAKE_MS = 5000  # for a peer to prove that it knows the secret
REFUSALS = 3  # connections closed during the handshake: no accident


class LinkError(ConfigError):
    """A connection between hosts cannot be had. ``refused``: there is somebody, who does not accept
    the secret; else nobody has answered."""

    def __init__(self, message: str, refused: bool = False) -> None:
        super().__init__(message)
        self.refused = refused


@dataclass(frozen=True)
class Keys:
    """What a secret gives: Curve25519 pairs (public, secret), in Z85 as ZMQ takes them."""

    server: tuple[bytes, bytes]
    client: tuple[bytes, bytes]

    @classmethod
    def of(cls, secret: bytes) -> Keys:
        return cls(_pair(secret, b"octavo server"), _pair(secret, b"octavo client"))


def session_secret(secret: bytes | None, session: str) -> bytes:
    """Of the sockets of one engine that has joined: an earlier one, back from behind a cut cable,
    cannot connect in its place. ``secret``: the cluster's; None on loopback."""
    key = blake2b(secret or b"", digest_size=64).digest()
    return blake2b(session.encode(), key=key, person=b"octavo session").digest()


def _pair(secret: bytes, role: bytes) -> tuple[bytes, bytes]:
    # Hashed first, for BLAKE2 takes keys of at most 64 bytes.
    key = blake2b(secret, digest_size=64).digest()
    private = z85.encode(blake2b(key=key, person=role, digest_size=32).digest())
    return zmq.curve_public(private), private


class _OneClient:
    """What zmq.auth asks of every peer."""

    def __init__(self, public: bytes) -> None:
        self._public = public

    def callback(self, domain: str, key: bytes) -> bool:
        return key == self._public


class Wire:
    """The TCP sockets of one ZMQ context. ``secret`` None: loopback addresses alone, and nothing
    is encrypted there; the sockets of other transports (ipc) are never touched.

    ``patient``: a connection is never given up while both ends live, so that nothing is lost of
    what crosses a link that was cut for a while: for those who watch their peers themselves.

    ``close`` before the context is ended: an authenticator runs in a thread of its own. Sockets
    are the caller's to close.
    """

    def __init__(
        self, context: zmq.Context[Any], secret: bytes | None, patient: bool = False
    ) -> None:
        self._context = context
        self._patient = patient
        self._keys = Keys.of(secret) if secret is not None else None
        self._doorman: ThreadAuthenticator | None = None

    def listen(self, kind: int, address: str) -> tuple[Socket, str]:
        """A socket of ``kind`` (``zmq.PULL`` …) bound to ``address``: ``tcp://HOST:PORT``, port 0
        for any free one, or ``ipc://PATH``. Returns it with the endpoint that it got.

        Raises ConfigError for an address that is not of this machine or is taken, and for one that
        other hosts can reach where there is no secret.
        """
        socket = self._socket(kind)
        try:
            return socket, self.bind(socket, address)
        except ConfigError:
            socket.close(linger=0)
            raise

    def bind(self, socket: Socket, address: str) -> str:
        """As ``listen``, for a socket of the context that is there. Returns the endpoint."""
        address = _numeric(address)
        if address.startswith("tcp:") and self._keys is None and not is_loopback(address):
            raise ConfigError(
                f"{address} can be reached from other hosts, and there is no secret to guard it: "
                f"{CLUSTER_SECRET_REMEDY}"
            )
        self._prepare(socket, address)
        if address.startswith("tcp:") and self._keys is not None:
            self._guard(self._keys)
            socket.curve_server = True
            socket.curve_secretkey = self._keys.server[1]
            socket.zap_domain = b"octavo"
        host, _, port = address.rpartition(":")
        try:
            socket.bind(f"{host}:*" if port == "0" else address)
        except zmq.ZMQError as error:
            hint = "an address of this machine (0.0.0.0: all of them) and a free port are needed"
            why = os.strerror(error.errno) if error.errno else str(error)
            raise ConfigError(f"{address}: {why}; {hint}") from None
        return socket.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")

    def dial(self, kind: int, endpoint: str, within: float | None = None) -> Socket:
        """A socket of ``kind`` that connects to ``endpoint``, again and again when it is cut off.

        ``within``: seconds to wait for the connection; LinkError says why there is none. Without,
        the socket is returned at once.
        """
        socket = self._socket(kind)
        try:
            self.connect(socket, endpoint, within)
        except LinkError:
            socket.close(linger=0)
            raise
        return socket

    def connect(self, socket: Socket, endpoint: str, within: float | None = None) -> None:
        """As ``dial``, for a socket of the context that is there."""
        self._prepare(socket, endpoint)
        if endpoint.startswith("tcp:") and self._keys is not None:
            socket.curve_serverkey = self._keys.server[0]
            socket.curve_publickey, socket.curve_secretkey = self._keys.client
        try:
            if within is None:
                socket.connect(endpoint)
            else:
                _connect(socket, endpoint, within)
        except zmq.ZMQError as error:
            raise LinkError(f"{endpoint}: {error.strerror or error}") from None

    def close(self) -> None:
        if self._doorman is not None:
            self._doorman.stop()
            self._doorman = None

    def _socket(self, kind: int) -> Socket:
        socket: Socket = self._context.socket(kind)
        socket.sndhwm = socket.rcvhwm = 0  # nothing is dropped because a peer is slow
        return socket

    def _prepare(self, socket: Socket, address: str) -> None:
        if not address.startswith("tcp:"):
            return
        socket.ipv6 = "[" in address
        socket.linger = SILENCE_MS  # what a peer that has gone was to get never holds up an end
        socket.handshake_ivl = HANDSHAKE_MS
        socket.connect_timeout = CONNECT_MS
        socket.reconnect_ivl, socket.reconnect_ivl_max = RECONNECT_MS
        if not self._patient:
            socket.heartbeat_ivl = PING_MS
            socket.heartbeat_timeout = socket.heartbeat_ttl = SILENCE_MS
            socket.tcp_maxrt = SILENCE_MS  # sent, and not acknowledged for so long

    def _guard(self, keys: Keys) -> None:
        """Of each context ZMQ asks one authenticator."""
        if self._doorman is None:
            self._doorman = ThreadAuthenticator(self._context)
            self._doorman.start()
            self._doorman.configure_curve_callback("octavo", _OneClient(keys.client[0]))


def _numeric(address: str) -> str:
    """``tcp://NAME:PORT`` with NAME's address, for ZMQ binds to no names. Raises ConfigError."""
    if not address.startswith("tcp:"):
        return address
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    if host == "*" or host.startswith("[") or host in (name for _, name in sockets.if_nameindex()):
        return address
    try:
        found = sockets.getaddrinfo(host, None, type=sockets.SOCK_STREAM)
    except OSError as error:
        raise ConfigError(f"{address}: {host} is no address and no known name ({error})") from None
    # An IPv4 address where it has one.
    family, *_, place = min(found, key=lambda entry: entry[0] != sockets.AF_INET)
    known = f"[{place[0]}]" if family == sockets.AF_INET6 else place[0]
    return f"tcp://{known}:{port}"


class Connections:
    """Those of a listening socket, from the events of its monitor: which of them have proved
    themselves. Others come and go at anybody's will, and mean nothing."""

    FAILURES = (
        zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
        | zmq.EVENT_HANDSHAKE_FAILED_AUTH
        | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    )
    EVENTS = zmq.EVENT_ACCEPTED | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | FAILURES

    def __init__(self) -> None:
        self._failed = False  # the connection whose end is told next was never let in
        self._strange: set[int] = set()  # descriptors
        self._known: set[int] = set()

    def take(self, event: int, descriptor: int) -> bool:
        """True when one that had proved itself has ended."""
        if event == zmq.EVENT_ACCEPTED:
            self._known.discard(descriptor)
            self._strange.add(descriptor)
        elif event == zmq.EVENT_HANDSHAKE_SUCCEEDED:  # which one, ZMQ does not say
            self._known |= self._strange
            self._strange.clear()
        elif event & self.FAILURES:
            self._failed = True
        elif event == zmq.EVENT_DISCONNECTED:
            failed, self._failed = self._failed, False
            ended = descriptor in self._known and not failed
            self._known.discard(descriptor)
            self._strange.discard(descriptor)
            return ended
        return False


def is_loopback(address: str) -> bool:
    """Whether ``tcp://HOST:PORT`` can be reached from this host alone."""
    host = address.removeprefix("tcp://").rpartition(":")[0].strip("[]")
    if host in ("localhost", "lo"):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _connect(socket: Socket, endpoint: str, within: float) -> None:
    """Connects and waits until both ends have proved themselves."""
    failures = zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    watched = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_CONNECTED | failures
    monitor = socket.get_monitor_socket(watched | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL)
    num_connected = 0
    deadline = time.monotonic() + within
    try:
        socket.connect(endpoint)
        while monitor.poll(max(0, int(1000 * (deadline - time.monotonic())))):
            event = recv_monitor_message(monitor)["event"]
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                return
            num_connected += event == zmq.EVENT_CONNECTED
            if event & failures or num_connected > REFUSALS:
                break
    finally:
        with contextlib.suppress(zmq.ZMQError):
            socket.disable_monitor()
        monitor.close(linger=0)
    if num_connected:
        raise LinkError(
            f"{endpoint} is there but does not accept this cluster secret: both hosts need the same"
            f" ({CLUSTER_SECRET_REMEDY}), and both or none must have one",
            refused=True,
        )
    raise LinkError(
        f"{endpoint}: no answer within {within:g} s; is the head node up, is this its address and "
        "port, and does a firewall let it through?"
    )
