"""Several engines behind one client, with engines that say what the prompt tells them to."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from octavo.config import EngineConfig, ParallelConfig, SchedulerConfig
from octavo.engine import replica as replica_module
from octavo.engine.admission import prepare
from octavo.engine.messages import RETRIED
from octavo.engine.placement import local_replicas
from octavo.engine.replica import LONGEST_PAUSE, MOST_RESTARTS, RESTART_WINDOW, Restarts
from octavo.engine.replicas import Replicas
from octavo.types import ConfigError, EngineDead, InvalidRequest, QueueFull, SamplingParams
from tests.engine.test_client import ROOMY, collect, first, mock_command
from tests.fixtures.waiting import PATIENCE, come

SLOW = {"step_seconds": 0.02}
LONG = {"max_tokens": 20_000}  # minutes: what is over sooner was ended


@pytest.fixture(autouse=True)
def no_gpus(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


@asynccontextmanager
async def replicas(num=2, scheduler=None, ready=True, **options):
    config = EngineConfig(
        parallel=ParallelConfig(data_parallel_size=num), scheduler=scheduler or SchedulerConfig()
    )
    client = Replicas(local_replicas(config, mock_command(**ROOMY, **options)))
    await client.start()
    try:
        if ready:
            await client.ready()
        yield client
    finally:
        await client.close()


def request(client, text, **params):
    params = SamplingParams(**params)
    handle = client.allocate(params.n)
    return prepare(
        client.info, params, list(text.encode()), handle=handle, request_id=f"r{handle}",
        arrival=time.monotonic(),
    )  # fmt: skip


def submit(client, text, **params):
    return client.submit([request(client, text, **params)])


def text_of(tokens):
    return bytes(token for _, token in tokens if token < 256).decode()


def running(client):
    return [replica.client.num_open for replica in client.replicas]


def check_counts(client):
    for replica in client.replicas:
        engine = replica.client
        assert replica.num_admitted == (
            sum(replica.ended.values()) + engine.num_running + engine.num_waiting
        )


def run(coroutine):
    asyncio.run(coroutine)


# ---- routing ----


def test_requests_are_spread_and_answered_by_both():
    async def main():
        async with replicas(**SLOW) as client:
            streams = [submit(client, f"say:number {i}") for i in range(6)]
            assert running(client) == [3, 3]
            for i, stream in enumerate(streams):
                tokens, finished = await collect(stream)
                assert text_of(tokens) == f"number {i}"
                assert len(finished) == 1
            assert [r.num_admitted for r in client.replicas] == [3, 3]
            assert client.num_open == 0
            check_counts(client)

    run(main())


def test_choices_stay_together_and_a_list_is_spread_in_one_stream():
    async def main():
        async with replicas(**SLOW) as client:
            stream = submit(client, "say:abc", n=3)
            assert sorted(running(client)) == [0, 3]
            await collect(stream)
            stream = client.submit([request(client, f"say:{i}") for i in range(6)])
            assert running(client) == [3, 3]
            tokens, finished = await collect(stream)
            assert len(finished) == 6
            assert sorted(text_of(tokens)) == list("012345")

    run(main())


def test_a_conversation_returns_to_its_replica_until_the_cache_is_reset():
    async def main():
        async with replicas() as client:
            history = "".join(f"line {i} of what was said. " for i in range(10))
            await collect(submit(client, history + "say:x"))
            (place,) = [r.index for r in client.replicas if r.num_admitted]
            for turn in range(3):
                history += f"and turn {turn}. "
                await collect(submit(client, history + "say:x"))
            assert client.replicas[place].num_admitted == 4
            assert await client.reset_prefix_cache() is True
            held = [client._router._known[i].num_tokens for i in (0, 1)]
            assert held == [0, 0]

    run(main())


def test_requests_of_one_hint_stay_together():
    async def main():
        async with replicas() as client:
            for index in range(4):
                stream = client.submit([request(client, f"{index} say:x")], hint=b"these")
                await collect(stream)
            assert sorted(r.num_admitted for r in client.replicas) == [0, 4]

    run(main())


def test_a_queue_is_full_only_where_every_replica_s_is():
    async def main():
        scheduler = SchedulerConfig(max_num_queued_reqs=2)  # one for each
        async with replicas(scheduler=scheduler, max_num_seqs=1, **SLOW) as client:
            for _ in range(2):
                await first(submit(client, "endless", **LONG))
            for _ in range(2):
                submit(client, "say:waits")
            assert running(client) == [2, 2]
            with pytest.raises(QueueFull):
                submit(client, "say:too many")
            with pytest.raises(
                InvalidRequest, match="holds 50 prompts, this server queues at most"
            ):
                client.check_queue(50)

    run(main())


# ---- failure ----


def test_what_a_killed_replica_has_given_nothing_for_goes_on_elsewhere():
    async def main():
        async with replicas(max_num_seqs=2, **SLOW) as client:
            streams = [submit(client, "endless", **LONG) for _ in range(4)]
            for stream in streams:
                await first(stream)
            waiting = [submit(client, f"say:waited {i}") for i in range(4)]
            assert running(client) == [4, 4]
            lost = client.replicas[0].client
            os.kill(lost.pid, signal.SIGKILL)
            results = await asyncio.gather(*map(collect, streams[::2]), return_exceptions=True)
            failed = [error for error in results if isinstance(error, EngineDead)]
            assert len(failed) == 2 and "signal 9" in str(failed[0])
            assert client.problem() is None
            for stream in streams[1::2]:
                client.abort(list(stream.open))
            for i, stream in enumerate(waiting):
                tokens, finished = await collect(stream)
                assert text_of(tokens) == f"waited {i}"
                assert len(finished) == 1
            assert client.replicas[0].ended[RETRIED] == 2
            assert client.replicas[0].ended["error"] == 2
            check_counts(client)
            await come(lambda: client.num_serving == 2)
            assert client.replicas[0].client is not lost
            assert client.replicas[0].restarts.count == 1
            check_counts(client)
            await asyncio.gather(*(collect(submit(client, f"say:{i}")) for i in range(4)))
            assert client.replicas[0].client.num_admitted > 0
            check_counts(client)

    run(main())


def test_a_started_request_begins_again_once_and_is_told_to_have_started_once():
    """It may be what kills engines: it must not take all of them."""

    async def main():
        async with replicas(3, hold=True) as client:
            stream = submit(client, "say:never")
            events = await anext(stream)
            assert [s.handle for s in events.more.started] == list(stream.open)
            first_place = running(client).index(1)
            os.kill(client.replicas[first_place].client.pid, signal.SIGKILL)
            await come(lambda: running(client)[first_place] == 0)
            assert sum(running(client)) == 1
            second_place = running(client).index(1)
            await come(lambda: client.replicas[second_place].client.num_running == 1)
            assert stream._pending is None, "no event a second time"
            os.kill(client.replicas[second_place].client.pid, signal.SIGKILL)
            with pytest.raises(EngineDead):
                await asyncio.wait_for(collect(stream), PATIENCE)
            assert running(client) == [0, 0, 0]
            check_counts(client)

    run(main())


def test_a_stopped_replica_is_left_out_and_comes_back():
    async def main():
        async with replicas(max_num_seqs=1, **SLOW) as client:
            streams = [submit(client, "endless", **LONG) for _ in range(2)]
            for stream in streams:
                await first(stream)
            waiting = [submit(client, f"say:waited {i}") for i in range(2)]
            stopped = client.replicas[0].client
            os.kill(stopped.pid, signal.SIGSTOP)
            with pytest.raises(EngineDead, match="not answered"):
                await collect(streams[0])
            assert client.problem() is None and client.num_serving == 1
            client.abort(list(streams[1].open))
            for i, stream in enumerate(waiting):
                assert text_of((await collect(stream))[0]) == f"waited {i}"
            await collect(submit(client, "say:only the other"))
            assert stopped.num_admitted == 2
            os.kill(stopped.pid, signal.SIGCONT)
            await come(lambda: client.num_serving == 2)
            assert client.replicas[0].client is stopped, "it was not started again"
            await asyncio.gather(*(collect(submit(client, f"say:{i}")) for i in range(4)))
            assert stopped.num_admitted > 2
            assert stopped.ended[RETRIED] == 1
            check_counts(client)

    run(main())


def test_a_replica_that_stays_stopped_is_started_again():
    async def main():
        async with replicas(scheduler=SchedulerConfig(step_deadline=2.0)) as client:
            stopped = client.replicas[1].client
            os.kill(stopped.pid, signal.SIGSTOP)
            await come(lambda: client.replicas[1].client is not stopped)
            await come(lambda: client.num_serving == 2)
            assert not os.path.exists(f"/proc/{stopped.pid}")

    run(main())


def test_when_the_last_is_gone_the_server_is():
    async def main():
        async with replicas() as client:
            streams = [submit(client, "endless", **LONG) for _ in range(2)]
            for stream in streams:
                await first(stream)
            for replica in client.replicas:
                os.kill(replica.client.pid, signal.SIGKILL)
            await asyncio.wait_for(client.dead.wait(), PATIENCE)
            for stream in streams:
                with pytest.raises(EngineDead):
                    await collect(stream)
            assert not client.alive
            assert "replica 0: the engine process ended by signal 9" in client.problem()
            with pytest.raises(EngineDead, match="no replica serves"):
                submit(client, "say:x")
            check_counts(client)

    run(main())


def test_a_replica_that_cannot_load_any_more_is_given_up(tmp_path, monkeypatch):
    monkeypatch.setattr(replica_module, "FIRST_PAUSE", 0.01)
    monkeypatch.setattr(replica_module, "LONGEST_PAUSE", 0.01)
    broken = tmp_path / "broken"

    async def main():
        async with replicas(fail_again=str(broken)) as client:
            broken.touch()
            os.kill(client.replicas[1].client.pid, signal.SIGKILL)
            await come(lambda: "was started" in (client.replicas[1].problem() or ""))
            assert client.replicas[1].restarts.count == MOST_RESTARTS
            assert client.problem() is None
            await collect(submit(client, "say:one is enough"))

    run(main())


def test_restarts_have_a_bound_within_a_time():
    policy = Restarts()
    pauses = [policy.pause(float(second)) for second in range(MOST_RESTARTS)]
    assert pauses == [1.0, 2.0, 4.0, 8.0, 16.0] and max(pauses) <= LONGEST_PAUSE
    assert policy.pause(100.0) is None
    assert policy.pause(RESTART_WINDOW + 1.5) is not None


# ---- start and end ----


def test_a_replica_that_fails_to_load_ends_the_start_with_its_error():
    async def main():
        broken = {"1": {"fail": "weights are missing"}}
        async with replicas(ready=False, replicas=broken) as client:
            with pytest.raises(ConfigError, match="replica 1: weights are missing"):
                await asyncio.wait_for(client.ready(), PATIENCE)

    run(main())


def test_progress_is_that_of_the_slowest():
    async def main():
        seen = []
        config = EngineConfig(parallel=ParallelConfig(data_parallel_size=2))
        specs = local_replicas(config, mock_command())
        client = Replicas(specs, seen.append)
        await client.start()
        await client.ready()
        await client.close()
        assert [p.phase for p in seen] == ["weights"]
        assert not client.directory.exists()

    run(main())


def test_a_request_that_fits_one_fits_all():
    async def main():
        async with replicas(replicas={"1": {"num_blocks": 20, "max_model_len": 300}}) as client:
            assert (client.info.num_blocks, client.info.max_model_len) == (20, 300)
            assert client.info.reasons["data_parallel_size"].startswith("2 replicas")

    run(main())


def test_drain_lets_both_finish():
    async def main():
        async with replicas(**SLOW) as client:
            streams = [submit(client, f"say:finish {i}") for i in range(4)]
            client.drain()
            with pytest.raises(EngineDead, match="shutting down"):
                submit(client, "say:late")
            for i, stream in enumerate(streams):
                assert text_of((await collect(stream))[0]) == f"finish {i}"
            ends = [replica.client._child.wait() for replica in client.replicas]
            assert await asyncio.wait_for(asyncio.gather(*ends), PATIENCE) == ["", ""]
            assert client.alive

    run(main())


# ---- places ----


def config(count, **settings):
    return EngineConfig(parallel=ParallelConfig(data_parallel_size=count, **settings))


def devices(spec):
    return spec.launcher._devices


def test_each_replica_has_gpus_of_its_own(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,GPU-abc,6,7,8")
    specs = local_replicas(config(2, tensor_parallel_size=2))
    assert [devices(spec) for spec in specs] == ["4,GPU-abc", "6,7"]
    assert [spec.config.parallel.replica for spec in specs] == [0, 1]
    assert [spec.config.parallel.replica_memory for spec in specs] == [None, None]
    with pytest.raises(ConfigError, match="3 replicas of 2 GPUs need 6 GPUs, 5 can be seen"):
        local_replicas(config(3, tensor_parallel_size=2))


def test_on_a_cpu_cores_memory_and_queue_are_divided(monkeypatch):
    monkeypatch.setattr("octavo.engine.placement.available_cores", lambda: 7)
    monkeypatch.setattr("octavo.engine.placement.available_memory", lambda: 12 << 30)
    given = replace(config(3), scheduler=SchedulerConfig(max_num_queued_reqs=10))
    specs = local_replicas(given)
    assert [devices(spec) for spec in specs] == [None] * 3
    for spec in specs:
        assert spec.config.parallel.cpu_threads == 2
        assert spec.config.parallel.replica_memory == 4 << 30
        assert spec.config.scheduler.max_num_queued_reqs == 4
    assert local_replicas(config(3, cpu_threads=5))[0].config.parallel.cpu_threads == 5
    assert local_replicas(config(1))[0].config == config(1), "one replica has everything"


def test_the_command_is_this_python():
    assert local_replicas(config(2))[0].launcher._command[0] == sys.executable
