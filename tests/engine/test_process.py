"""The engine process's loop, in this process: sockets and threads."""

import zmq

from octavo.config import EngineConfig
from octavo.engine.messages import Drain, Heartbeat, Outputs, encoder, from_engine_decoder
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


def test_idle_moments_are_used_and_what_they_leave_to_do_is_told(tmp_path):
    addresses = [f"ipc://{tmp_path}/{name}" for name in ("inbox", "outbox")]
    with (
        zmq.Context() as context,
        context.socket(zmq.PUSH) as inbox,
        context.socket(zmq.PULL) as outbox,
    ):
        inbox.bind(addresses[0])
        outbox.bind(addresses[1])
        loop = EngineLoop(EngineConfig(), *addresses)
        loop.engine, executor = toy_engine()
        loop._executor = executor
        executor.num_pending = 3
        assert [loop._use_idle_moment() for _ in range(4)] == [True, True, True, False]
        told = [from_engine_decoder.decode(outbox.recv()) for _ in range(3)]
        assert all(isinstance(message, Outputs) for message in told)
        assert [message.stats.graphs_pending for message in told] == [2, 1, 0]

        executor.num_pending = 2
        inbox.send(encoder.encode(Drain()))
        loop.run()
        assert executor.num_pending < 2 and executor.ended
        loop.close()
