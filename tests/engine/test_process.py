"""The engine process's loop, in this process: sockets and threads."""

import contextlib

import numpy as np
import zmq

from octavo.config import EngineConfig
from octavo.engine.messages import (
    CLIENT_SHIFT,
    Drain,
    EngineStats,
    Finished,
    Heartbeat,
    Outputs,
    Started,
    encoder,
    from_engine_decoder,
    pack_ids,
)
from octavo.engine.process import EngineLoop, Heart
from octavo.engine.seats import Seats
from octavo.types import FinishReason, RequestTimings
from tests.engine.toy import add_request, toy_engine


def test_the_heart_beats_until_the_loop_closes_and_closes_its_own_socket(tmp_path):
    addresses = [f"ipc://{tmp_path}/{name}" for name in ("inbox", "outbox")]
    with zmq.Context() as context, context.socket(zmq.PULL) as client:
        client.bind(addresses[1])
        loop = EngineLoop(EngineConfig(), *addresses)
        loop.engine, loop._executor = toy_engine()
        loop._heart = heart = Heart(loop._seats, loop)
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


def test_each_client_gets_its_own_part_of_the_outputs_and_one_that_left_gets_nothing(tmp_path):
    addresses = [[f"ipc://{tmp_path}/{name}-{i}" for i in (0, 1)] for name in ("inbox", "outbox")]
    other = 1 << CLIENT_SHIFT
    outputs = Outputs(
        EngineStats(time=1.0, num_running=3),
        handles=np.array([1, other + 1, 2], dtype="<i8").tobytes(),
        tokens=pack_ids([10, 11, 12]),
        started=[Started(1, 0.0, 0), Started(other + 1, 0.0, 4)],
        finished=[Finished(other + 1, FinishReason.STOP, None, RequestTimings(arrival=0.0))],
    )
    with zmq.Context() as context, contextlib.ExitStack() as stack:
        clients = [stack.enter_context(context.socket(zmq.PULL)) for _ in range(2)]
        for client, address in zip(clients, addresses[1]):
            client.bind(address)
        own = zmq.Context()
        seats = Seats(own, *map(",".join, addresses))

        def receive(client):
            assert client.poll(2000)
            return from_engine_decoder.decode(client.recv())

        seats.send_outputs(outputs)
        first, second = map(receive, clients)
        assert first.pairs() == [(1, 10), (2, 12)]
        assert second.pairs() == [(other + 1, 11)]
        assert [s.handle for s in first.started] == [1] and not first.finished
        assert [f.handle for f in second.finished] == [other + 1]
        assert first.stats == second.stats == outputs.stats
        seats.leave(1)
        seats.send_outputs(outputs)
        seats.take(1)
        seats.send_to(1, Heartbeat(0.0, 7, 0.0))
        assert receive(clients[0]).pairs() == [(1, 10), (2, 12)]
        assert receive(clients[1]).step == 7
        own.destroy(linger=0)


def test_requests_of_a_client_that_left_are_dropped_and_others_stay():
    engine, _ = toy_engine()
    for handle in (1, (1 << CLIENT_SHIFT) + 1, (1 << CLIENT_SHIFT) + 2):
        engine.add(add_request(handle, [5, 6, 7], 9))
    engine.abort_client(1)
    assert list(engine._requests) == [1, (1 << CLIENT_SHIFT) + 1, (1 << CLIENT_SHIFT) + 2]
    ended = engine.step()
    assert sorted(f.handle >> CLIENT_SHIFT for f in ended.finished) == [1, 1]
    assert list(engine._requests) == [1]
