"""The engine process's loop, in this process: sockets and threads."""

import zmq

from octavo.config import EngineConfig
from octavo.engine.messages import Heartbeat, from_engine_decoder
from octavo.engine.process import EngineLoop, Heart
from tests.engine.toy import toy_engine


def test_the_heart_beats_until_the_loop_closes_and_closes_its_own_socket(tmp_path):
    addresses = [f"ipc://{tmp_path}/{name}" for name in ("inbox", "outbox")]
    with zmq.Context() as context, context.socket(zmq.PULL) as client:
        client.bind(addresses[1])
        loop = EngineLoop(EngineConfig(), *addresses)
        loop.engine = toy_engine()[0]
        loop._heart = heart = Heart(loop._context, addresses[1], loop)
        heart.start()
        assert client.poll(2000)
        assert isinstance(from_engine_decoder.decode(client.recv()), Heartbeat)
        loop.close()
        assert not heart.is_alive() and loop._context.closed
