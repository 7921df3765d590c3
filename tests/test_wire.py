"""ZMQ sockets between hosts: who gets in, and how fast a cut connection is noticed."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time

import pytest
import zmq
from zmq.utils.monitor import recv_monitor_message

from octavo.config import cluster_secret
from octavo.types import ConfigError
from octavo.wire import SILENCE_MS, Connections, Keys, LinkError, Wire, is_loopback
from tests.fixtures.waiting import PATIENCE

SECRET = b"0123456789abcdef-of-this-test"
ANYWHERE = "tcp://127.0.0.1:0"


@contextlib.contextmanager
def ends(*secrets):
    """A Wire, in a context of its own, for each secret."""
    contexts = [zmq.Context() for _ in secrets]
    wires = [Wire(context, secret) for context, secret in zip(contexts, secrets)]
    try:
        yield wires
    finally:
        for wire, context in zip(wires, contexts):
            wire.close()
            context.destroy(linger=0)


def received(puller, seconds):
    return puller.recv() if puller.poll(int(1000 * seconds)) else None


@pytest.mark.parametrize("secret", [SECRET, None])
def test_same_secret_on_both_ends_passes_messages(secret):
    with ends(secret, secret) as (head, peer):
        puller, endpoint = head.listen(zmq.PULL, ANYWHERE)
        peer.dial(zmq.PUSH, endpoint, within=PATIENCE).send(b"hello")
        assert received(puller, PATIENCE) == b"hello"


@pytest.mark.parametrize("theirs", [b"another secret of some length", None])
def test_peer_with_another_secret_or_none_gets_nowhere(theirs):
    with ends(SECRET, theirs) as (head, stranger):
        puller, endpoint = head.listen(zmq.PULL, ANYWHERE)
        with pytest.raises(LinkError, match="does not accept this cluster secret"):
            stranger.dial(zmq.PUSH, endpoint, within=PATIENCE)
        with contextlib.suppress(zmq.Again):
            stranger.dial(zmq.PUSH, endpoint).send(b"let me in", zmq.NOBLOCK)
        assert received(puller, 0.5) is None


def test_listener_without_the_secret_gets_nothing_from_those_who_have_it():
    with ends(None, SECRET) as (impostor, peer):
        puller, endpoint = impostor.listen(zmq.PULL, ANYWHERE)
        with pytest.raises(LinkError, match="both or none"):
            peer.dial(zmq.PUSH, endpoint, within=PATIENCE)
        assert received(puller, 0.1) is None


def test_only_the_derived_client_key_is_let_in():
    """Whoever knows the listener's public key alone is refused by the authenticator."""
    keys = Keys.of(SECRET)
    with ends(SECRET) as (head,):
        puller, endpoint = head.listen(zmq.PULL, ANYWHERE)
        context = zmq.Context()
        pusher = context.socket(zmq.PUSH)
        pusher.curve_serverkey = keys.server[0]
        pusher.curve_publickey, pusher.curve_secretkey = zmq.curve_keypair()
        pusher.connect(endpoint)
        pusher.send(b"let me in")
        assert received(puller, 0.5) is None
        context.destroy(linger=0)
    assert keys.server != keys.client and keys == Keys.of(SECRET) != Keys.of(SECRET + b"x")


def test_what_crosses_the_network_cannot_be_read():
    with ends(SECRET, SECRET) as (head, peer), socket.create_server(("127.0.0.1", 0)) as door:
        puller, endpoint = head.listen(zmq.PULL, ANYWHERE)
        port = int(endpoint.rpartition(":")[2])
        seen = bytearray()
        passing = threading.Thread(target=pass_on, args=(door, port, seen), daemon=True)
        passing.start()
        pusher = peer.dial(zmq.PUSH, f"tcp://127.0.0.1:{door.getsockname()[1]}", within=PATIENCE)
        pusher.send(b"the prompt of somebody")
        assert received(puller, PATIENCE) == b"the prompt of somebody"
        pusher.close()
        assert b"CURVE" in seen and b"prompt" not in seen and SECRET not in seen
        assert not any(key in seen for key in (*Keys.of(SECRET).server, *Keys.of(SECRET).client))


def pass_on(door, port, seen):
    """One connection to ``door`` is passed on to ``port``; ``seen``: its bytes."""
    near, _ = door.accept()
    far = socket.create_connection(("127.0.0.1", port))

    def copy(source, target):
        with contextlib.suppress(OSError):
            while chunk := source.recv(65536):
                seen.extend(chunk)
                target.sendall(chunk)

    back = threading.Thread(target=copy, args=(far, near), daemon=True)
    back.start()
    copy(near, far)


@pytest.mark.parametrize("address", ["tcp://0.0.0.0:0", "tcp://*:0", "tcp://[::]:0"])
def test_without_a_secret_nothing_listens_to_other_hosts(address):
    with ends(None) as (head,), pytest.raises(ConfigError, match="--cluster-secret-file"):
        head.listen(zmq.PULL, address)


def test_names_of_this_machine_are_bound_to_their_addresses():
    with ends(SECRET, SECRET) as (head, peer):
        puller, endpoint = head.listen(zmq.PULL, "tcp://localhost:0")
        assert endpoint.startswith("tcp://127.0.0.1:")
        peer.dial(zmq.PUSH, endpoint.replace("127.0.0.1", "localhost"), within=20).send(b"hello")
        assert received(puller, 20) == b"hello"
        with pytest.raises(ConfigError, match=r"no\.such\.host\.invalid is no address"):
            head.listen(zmq.PULL, "tcp://no.such.host.invalid:0")


def test_taken_port_is_named():
    with ends(SECRET) as (head,):
        _, endpoint = head.listen(zmq.PULL, ANYWHERE)
        with pytest.raises(ConfigError, match=rf"{endpoint}: Address already in use"):
            head.listen(zmq.PULL, endpoint)


def test_nobody_there():
    with ends(SECRET) as (peer,), socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        endpoint = f"tcp://127.0.0.1:{reserved.getsockname()[1]}"
        with pytest.raises(LinkError, match=r"no answer within 0.5 s"):
            peer.dial(zmq.PUSH, endpoint, within=0.5)


def test_ipc_sockets_are_left_alone(tmp_path):
    with ends(SECRET, None) as (head, peer):
        puller, endpoint = head.listen(zmq.PULL, f"ipc://{tmp_path}/socket")
        peer.dial(zmq.PUSH, endpoint, within=PATIENCE).send(b"hello")
        assert received(puller, PATIENCE) == b"hello"


def test_silent_connection_is_noticed_and_made_again():
    """The listener's packets vanish, as when a cable is cut: no FIN, no RST."""
    with ends(SECRET, SECRET) as (head, peer), socket.create_server(("127.0.0.1", 0)) as door:
        puller, endpoint = head.listen(zmq.PULL, ANYWHERE)
        port = int(endpoint.rpartition(":")[2])
        silent = threading.Event()
        threading.Thread(target=deaf_relay, args=(door, port, silent), daemon=True).start()
        pusher = peer.dial(zmq.PUSH, f"tcp://127.0.0.1:{door.getsockname()[1]}")
        pusher.send(b"there")
        assert received(puller, PATIENCE) == b"there"
        # By a name of its own: that of the monitor which ``dial`` had may not be free yet.
        monitor = pusher.get_monitor_socket(zmq.EVENT_DISCONNECTED, "inproc://is-it-noticed")
        silent.set()
        began = time.monotonic()
        assert monitor.poll(1000 * PATIENCE)
        assert time.monotonic() - began > SILENCE_MS / 1000 / 2
        silent.clear()
        pusher.disable_monitor()
        monitor.close(linger=0)
        pusher.send(b"back again")
        assert received(puller, PATIENCE) == b"back again"


def deaf_relay(door, port, silent):
    """Connections to ``door`` are passed on to ``port``; while ``silent``, nothing is."""

    def copy(source, target):
        with contextlib.suppress(OSError):
            while chunk := source.recv(65536):
                if not silent.is_set():
                    target.sendall(chunk)

    with contextlib.suppress(OSError):
        while True:
            near, _ = door.accept()
            far = socket.create_connection(("127.0.0.1", port))
            for pair in ((near, far), (far, near)):
                threading.Thread(target=copy, args=pair, daemon=True).start()


def test_only_the_end_of_a_connection_that_was_let_in_counts():
    """Whoever has no secret cannot make the listener believe that its peer was cut off."""
    with ends(SECRET, b"another secret of some length") as (peer, stranger):
        context = zmq.Context()
        watched = Wire(context, SECRET)
        puller = context.socket(zmq.PULL)
        monitor = puller.get_monitor_socket(Connections.EVENTS)
        endpoint = watched.bind(puller, ANYWHERE)
        connections = Connections()

        def cuts(last):
            """Whether something that counts has ended, up to an event of that kind."""
            taken = []
            while monitor.poll(1000 * PATIENCE):
                event = recv_monitor_message(monitor)
                taken.append(connections.take(event["event"], event["value"]))
                if event["event"] == last:
                    return any(taken)
            raise AssertionError(f"no event {last} after {len(taken)} others")

        host, port = endpoint.removeprefix("tcp://").split(":")
        early = socket.create_connection((host, int(port)))  # while another is let in
        assert not cuts(zmq.EVENT_ACCEPTED)
        pusher = peer.dial(zmq.PUSH, endpoint, within=PATIENCE)
        assert not cuts(zmq.EVENT_HANDSHAKE_SUCCEEDED)
        early.close()
        assert not cuts(zmq.EVENT_DISCONNECTED)
        for noise in (b"", b"GET / HTTP/1.1\r\n\r\n" * 10):
            with socket.create_connection((host, int(port))) as raw:
                raw.sendall(noise)
            assert not cuts(zmq.EVENT_DISCONNECTED)
        with pytest.raises(LinkError):
            stranger.dial(zmq.PUSH, endpoint, within=PATIENCE)
        while monitor.poll(500):
            event = recv_monitor_message(monitor)
            assert not connections.take(event["event"], event["value"])
        pusher.close(linger=0)
        assert cuts(zmq.EVENT_DISCONNECTED)
        monitor.close(linger=0)
        watched.close()
        context.destroy(linger=0)


def test_loopback_addresses():
    near = ("tcp://127.0.0.1:0", "tcp://127.8.0.1:5", "tcp://[::1]:0", "tcp://localhost:1")
    assert all(map(is_loopback, near))
    assert not any(map(is_loopback, ("tcp://10.0.0.1:0", "tcp://*:0", "tcp://head:29500")))


def test_secret_of_file_or_environment(tmp_path, monkeypatch):
    monkeypatch.delenv("OCTAVO_CLUSTER_SECRET", raising=False)
    assert cluster_secret(None) is None
    file = tmp_path / "secret"
    file.write_text("a secret of a file\n")
    assert cluster_secret(str(file)) == b"a secret of a file"
    monkeypatch.setenv("OCTAVO_CLUSTER_SECRET", "a secret of the environment")
    assert cluster_secret(None) == b"a secret of the environment"
    assert cluster_secret(str(file)) == b"a secret of a file"
    file.write_text("short\n")
    with pytest.raises(ConfigError, match="5 bytes can be guessed"):
        cluster_secret(str(file))
    with pytest.raises(ConfigError, match="cannot be read"):
        cluster_secret(os.fspath(tmp_path / "none"))
