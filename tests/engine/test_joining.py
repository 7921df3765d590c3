"""Replicas of other nodes: a head and nodes in one process, with engines that need no model."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
from contextlib import asynccontextmanager
from dataclasses import replace

import msgspec
import pytest

from octavo.config import EngineConfig
from octavo.engine import door as door_module
from octavo.engine.clocks import ClockOffset
from octavo.engine.door import Door
from octavo.engine.headless import Node
from octavo.engine.joining import (
    Join,
    check_same_engine,
    checkpoint_facts,
    common_config,
    encoder,
    on_node,
)
from octavo.engine.launch import LocalLauncher
from octavo.engine.messages import EngineStats, Finished, Outputs, Started, shift
from octavo.engine.placement import local_replicas
from octavo.engine.replicas import Replicas
from octavo.flags import from_flags
from octavo.types import ConfigError, EngineLost, FinishReason, RequestTimings
from octavo.wire import Wire
from tests.engine.test_client import collect, first, mock_command
from tests.engine.test_replicas import running, submit, text_of
from tests.engine.toy import toy_info
from tests.fixtures.waiting import PATIENCE, come

SLOW = {"step_seconds": 0.02}


@pytest.fixture(autouse=True)
def no_gpus(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("OCTAVO_CLUSTER_SECRET", "a secret for these tests")


@pytest.fixture
def checkpoint(tmp_path):
    (tmp_path / "config.json").write_text('{"vocab_size": 260}')
    (tmp_path / "model.safetensors").write_bytes(bytes(range(256)) * 4096)
    return tmp_path


def config_of(**flags):
    return from_flags(EngineConfig, {"data_parallel_rpc_port": 0, **flags})


@asynccontextmanager
async def head(checkpoint, *, num=2, local=1, options=None, **flags):
    """A head node; ``client.port``: where it is joined."""
    config = config_of(data_parallel_size=num, data_parallel_size_local=local, **flags)
    door = Door(config, checkpoint_facts(checkpoint))
    specs = local_replicas(config, mock_command(**(options or SLOW))) + door.specs()
    door.start()
    client = Replicas(specs)
    client.port = int(door.endpoint.rpartition(":")[2])
    client.door = door
    await client.start()
    try:
        if local:
            await client.ready()
        yield client
    finally:
        await client.close()
        await door.close()


@asynccontextmanager
async def node(checkpoint, port, drain=0.0, options=None, **flags):
    """A headless node, as a task."""
    config = config_of(headless=True, data_parallel_rpc_port=port, **flags)
    running = Node(config, checkpoint, drain, mock_command(**(options or SLOW)))
    running.task = asyncio.create_task(running.run())
    try:
        yield running
    finally:
        running.stop()
        running.stop()
        await asyncio.gather(running.task, return_exceptions=True)


def test_joined_replica_serves_and_its_place_is_free_when_it_goes(checkpoint):
    async def main():
        async with head(checkpoint) as client:
            assert client.num_serving == 1 and client.problem() is None
            assert client.replicas[1].facts()["place"] == "another node, which has not joined yet"
            async with node(checkpoint, client.port) as joined:
                await come(lambda: client.num_serving == 2)
                assert client.replicas[1].facts()["place"] == f"node {socket.gethostname()}"
                streams = [submit(client, f"say:text {i}") for i in range(8)]
                assert running(client) == [4, 4]
                for i, stream in enumerate(streams):
                    tokens, _ = await collect(stream)
                    assert text_of(tokens) == f"text {i}"
                joined.stop()
                await asyncio.wait_for(joined.task, PATIENCE)
            await come(lambda: client.replicas[1].facts()["pid"] is None)
            assert client.num_serving == 1 and client.problem() is None
            tokens, _ = await collect(submit(client, "say:alone"))
            assert text_of(tokens) == "alone"
            async with node(checkpoint, client.port):
                await come(lambda: client.num_serving == 2)

    asyncio.run(main())


def test_a_node_keeps_what_is_its_own_to_choose(checkpoint):
    async def main():
        async with (
            head(checkpoint, max_num_seqs=5) as client,
            node(checkpoint, client.port, max_num_seqs=3),
        ):
            await come(lambda: client.num_serving == 2)
            assert [r.found.max_num_seqs for r in client.replicas] == [5, 3]

    asyncio.run(main())


def test_node_that_is_told_to_stop_finishes_what_it_has(checkpoint):
    async def main():
        async with head(checkpoint) as client, node(checkpoint, client.port, drain=60) as joined:
            await come(lambda: client.num_serving == 2)
            streams = [submit(client, "say:" + "x" * 200, max_tokens=300) for _ in range(4)]
            await asyncio.gather(*(first(stream) for stream in streams))
            joined.stop()
            await come(lambda: client.num_serving == 1)
            assert client.replicas[1].client.num_open == 2, "it still has what it had"
            assert [len(text_of((await collect(s))[0])) > 190 for s in streams] == [True] * 4
            assert await asyncio.wait_for(joined.task, PATIENCE) == 0

    asyncio.run(main())


def test_head_without_replicas_of_its_own_waits_for_the_first(checkpoint):
    async def main():
        async with head(checkpoint, num=1, local=0) as client:
            ready = asyncio.create_task(client.ready())
            await asyncio.sleep(0.2)
            assert not ready.done() and "no node has joined" in client.problem()
            async with node(checkpoint, client.port):
                info = await asyncio.wait_for(ready, PATIENCE)
                assert info.vocab_size == 260
                assert text_of((await collect(submit(client, "say:hello")))[0]) == "hello"
            await come(lambda: client.problem() is not None)
            assert not client.dead.is_set(), "another may come"
            async with node(checkpoint, client.port):
                await come(lambda: client.problem() is None)

    asyncio.run(main())


def test_killed_engine_of_a_node_is_started_again_and_joins(checkpoint):
    async def main():
        async with head(checkpoint) as client, node(checkpoint, client.port):
            await come(lambda: client.num_serving == 2)
            streams = [submit(client, "endless", max_tokens=100) for _ in range(2)]
            await asyncio.gather(*(first(stream) for stream in streams))
            lost = client.replicas[1].client.pid
            os.kill(lost, signal.SIGKILL)
            results = await asyncio.gather(*map(collect, streams), return_exceptions=True)
            assert sum(isinstance(result, EngineLost) for result in results) == 1
            await come(lambda: client.num_serving == 2)
            assert client.replicas[1].client.pid != lost

    asyncio.run(main())


def test_node_joins_again_when_the_head_does_not_know_it_any_more(checkpoint):
    async def main():
        async with head(checkpoint) as client, node(checkpoint, client.port):
            await come(lambda: client.num_serving == 2)
            lost = client.replicas[1].client.pid
            client.replicas[1].spec.launcher._guest.part("for this test")
            await come(lambda: client.num_serving == 1)
            await come(lambda: client.num_serving == 2)
            assert client.replicas[1].client.pid != lost

    asyncio.run(main())


@pytest.mark.parametrize("secret", ["a secret for these tests", ""])
def test_engine_that_was_given_up_cannot_come_back_in_anothers_place(
    checkpoint, monkeypatch, secret
):
    """It runs on, behind a cable that was cut, and the addresses of its sockets are the same."""
    monkeypatch.setenv("OCTAVO_CLUSTER_SECRET", secret)

    async def main():
        async with head(checkpoint) as client, node(checkpoint, client.port):
            await come(lambda: client.num_serving == 2)
            place = client.replicas[1].spec.launcher
            earlier = config_of()
            earlier = replace(earlier, parallel=replace(earlier.parallel, session="an earlier one"))
            stale = await LocalLauncher(mock_command(reject="not the engine that joined")).launch(
                place._endpoints["inbox-0"], place._endpoints["outbox-0"], earlier
            )
            await asyncio.sleep(1.0)  # it tries to connect
            for i in range(8):
                streams = [submit(client, f"say:{i} {j}") for j in range(2)]
                assert running(client) == [1, 1]
                for j, stream in enumerate(streams):
                    tokens, _ = await asyncio.wait_for(collect(stream), PATIENCE)
                    assert text_of(tokens) == f"{i} {j}"
            stale.kill()
            await stale.wait()

    asyncio.run(main())


def test_more_nodes_than_places_stand_by(checkpoint):
    async def main():
        async with head(checkpoint) as client, node(checkpoint, client.port) as joined:
            await come(lambda: client.num_serving == 2)
            place = client.replicas[1].client.pid
            async with node(checkpoint, client.port):
                await come(lambda: len(client.door._guests) == 2)
                joined.stop()
                await come(lambda: client.replicas[1].client.pid not in (place, None))
                await come(lambda: client.num_serving == 2)

    asyncio.run(main())


def test_silent_node_loses_its_place_to_one_that_asks(checkpoint, monkeypatch):
    monkeypatch.setattr(door_module, "MOST_SILENCE", 0.2)

    async def main():
        async with head(checkpoint) as client, node(checkpoint, client.port):
            await come(lambda: client.num_serving == 2)
            client.replicas[1].spec.launcher._guest.take = lambda message, now: None  # unheard
            await asyncio.sleep(1.0)
            async with node(checkpoint, client.port):
                await come(lambda: client.replicas[1].client.problem() is not None)
                await come(lambda: client.num_serving == 2)

    asyncio.run(main())


@pytest.mark.parametrize(
    ("change", "flags", "why"),
    [
        ("config.json", {}, "the model's settings on this node are not those of the head"),
        ("model.safetensors", {}, "the model's weights on this node"),
        ("", {"seed": 5, "dtype": "float32"}, "--dtype float32 where the head has auto, --seed 5"),
    ],
)
def test_node_that_does_not_fit_is_refused_with_the_difference(
    checkpoint, tmp_path_factory, change, flags, why
):
    other = tmp_path_factory.mktemp("other")
    for file in checkpoint.iterdir():
        raw = bytearray(file.read_bytes())
        if file.name == change:
            raw[len(raw) // 2] ^= 1
        (other / file.name).write_bytes(raw)

    async def main():
        async with head(checkpoint) as client, node(other, client.port, **flags) as refused:
            with pytest.raises(ConfigError, match=why):
                await asyncio.wait_for(refused.task, PATIENCE)
            assert client.num_serving == 1

    asyncio.run(main())


def test_node_with_another_secret_is_refused(checkpoint, tmp_path_factory):
    file = tmp_path_factory.mktemp("secrets") / "secret"
    file.write_text("not the secret of the head")

    async def main():
        async with (
            head(checkpoint) as client,
            node(checkpoint, client.port, cluster_secret_file=str(file)) as refused,
        ):
            with pytest.raises(ConfigError, match="does not accept this cluster secret"):
                await asyncio.wait_for(refused.task, PATIENCE)

    asyncio.run(main())


def test_engine_with_other_facts_is_sent_away_and_its_node_told_why(checkpoint):
    async def main():
        other = {**SLOW, "max_model_len": 256}
        async with (
            head(checkpoint) as client,
            node(checkpoint, client.port, options=other) as refused,
        ):
            with pytest.raises(ConfigError, match="256 tokens of a request, the head for 512"):
                await asyncio.wait_for(refused.task, PATIENCE)
            assert client.num_serving == 1 and client.info.max_model_len == 512

    asyncio.run(main())


def test_another_version_is_named_and_what_cannot_be_read_is_refused(checkpoint):
    import zmq

    async def ask(wire, client, raw):
        link = wire.dial(zmq.DEALER, client.door.endpoint)
        link.send(raw)
        await come(lambda: link.poll(0))
        answer = json.loads(json.dumps(msgspec.msgpack.decode(link.recv())))
        link.close()
        return answer["why"]

    async def main():
        async with head(checkpoint) as client:
            context = zmq.Context()
            wire = Wire(context, client.door.secret)
            old = encoder.encode(Join("0.0.1", "old-node", {}, b""))
            assert "this node has octavo 0.0.1, the head" in await ask(wire, client, old)
            assert "cannot read this" in await ask(wire, client, b"\x81\xa4type\xa4Nono")
            assert "cannot read this" in await ask(wire, client, b"noise")
            context.destroy(linger=0)

    asyncio.run(main())


def test_head_that_is_gone_takes_the_nodes_engine_with_it(checkpoint):
    async def main():
        async with head(checkpoint, step_deadline=1.0) as client:
            port = client.port
            async with node(checkpoint, port):
                await come(lambda: client.num_serving == 2)
                pid = client.replicas[1].client.pid
                os.kill(pid, 0)
                await client.close()
                await client.door.close()
                await come(lambda: not alive(pid))

    asyncio.run(main())


def alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


# ---- the parts ----


def test_heads_configuration_holds_and_nodes_choose_only_what_is_theirs():
    asked = config_of(max_model_len=1024, data_parallel_size=4, max_num_seqs=8, seed=3)
    own = config_of(headless=True, model="/elsewhere", max_num_seqs=16, cpu_threads=2, seed=3)
    config = common_config(asked, own)
    assert config.model.max_model_len == 1024 and config.model.model == "/elsewhere"
    assert config.scheduler.max_num_seqs == 16 and config.parallel.cpu_threads == 2
    part = replace(own, parallel=replace(own.parallel, cpu_threads=1, replica_memory=99))
    assert on_node(config, part).parallel.replica_memory == 99
    with pytest.raises(ConfigError, match="--max-model-len 2048 where the head has 1024"):
        common_config(asked, config_of(max_model_len=2048))


def test_differences_between_engines_are_named():
    one = toy_info()
    check_same_engine(one, toy_info(num_blocks=1, max_model_len=128))
    for change, why in (
        ({"dtype": "bfloat16"}, "start both with --dtype float32"),
        ({"vocab_size": 999}, "its vocab_size is 999, the head's 1000"),
        ({"default_sampling": {"top_k": 1}}, "sampling defaults"),
    ):
        with pytest.raises(ConfigError, match=why):
            check_same_engine(one, toy_info(**change))


def test_offset_of_a_clock_is_that_of_the_fastest_answer():
    offset = ClockOffset()
    offset.measure(sent=100.0, answered=5.4, now=101.0)  # slow: anything up to 0.5 s wrong
    offset.measure(sent=102.0, answered=7.001, now=102.002)
    offset.measure(sent=103.0, answered=8.4, now=103.5)
    assert offset.seconds == pytest.approx(95.0)


def test_times_are_moved_but_not_those_that_have_not_come():
    timings = RequestTimings(10.0, 11.0, -1.0, -1.0)
    outputs = Outputs(
        EngineStats(time=12.0), started=[Started(1, 11.0, 0)],
        finished=[Finished(1, FinishReason.ABORT, None, timings)],
    )  # fmt: skip
    shift(outputs, 100.0)
    assert (outputs.stats.time, outputs.started[0].time) == (112.0, 111.0)
    assert outputs.finished[0].timings == RequestTimings(110.0, 111.0, -1.0, -1.0)


def test_equal_files_have_equal_facts_and_any_byte_of_small_ones_counts(checkpoint, tmp_path):
    before = checkpoint_facts(checkpoint)
    assert before == checkpoint_facts(checkpoint)
    (checkpoint / "tokenizer.json").write_text("{}")
    after = checkpoint_facts(checkpoint)
    assert {name for name in before if before[name] != after[name]} == {"tokenizer"}
