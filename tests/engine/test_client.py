import asyncio
import json
import os
import signal
import sys
import tempfile
import time
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from octavo.config import EngineConfig, SchedulerConfig
from octavo.engine.admission import prepare
from octavo.engine.client import ProcessClient
from octavo.engine.launch import LocalLauncher
from octavo.types import ConfigError, EngineDead, FinishReason, QueueFull, SamplingParams
from tests.fixtures.waiting import PATIENCE, come

MOCK = Path(__file__).parents[1] / "server" / "mock_engine.py"


def mock_command(**options):
    return (sys.executable, str(MOCK), json.dumps(options))


# Seconds in which an engine's death or standstill is told; alone it takes two at most. Without a
# watch only a step's deadline, 30 s, would tell.
TOLD = 15
ROOMY = {"max_model_len": 32_768, "num_blocks": 4096}  # what is endless ends only by an abort


def mock(**options):
    return LocalLauncher(mock_command(**options))


@asynccontextmanager
async def engine(config=None, **options):
    client = ProcessClient(config or EngineConfig(), launcher=mock(**ROOMY, **options))
    await client.start()
    try:
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


async def collect(stream):
    tokens, finished = [], []
    async for events in stream:
        tokens += events.tokens
        finished += events.more.finished if events.more else []
    return tokens, finished


async def first(stream):
    async for events in stream:
        if events.tokens:
            return


def test_temporary_directory_too_long_for_sockets_is_the_users_to_mend(tmp_path, monkeypatch):
    long = tmp_path / ("x" * 120)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))

    async def main():
        with pytest.raises(ConfigError, match="set TMPDIR"):
            await ProcessClient(EngineConfig(), launcher=mock()).start()

    asyncio.run(main())
    assert not [*long.iterdir()]


def test_start_reports_progress_and_what_was_found():
    async def main():
        seen = []
        client = ProcessClient(EngineConfig(), seen.append, mock())
        await client.start()
        assert client.problem() == "the model is still loading"
        info = await client.ready()
        assert info.max_num_seqs == 8
        assert seen[0].phase == "weights"
        assert client.problem() is None
        directory = client.directory
        assert directory.exists()
        await client.close()
        assert not directory.exists()

    asyncio.run(main())


def test_user_error_while_loading_is_a_config_error():
    async def main():
        async with engine(fail="no such model") as client:
            with pytest.raises(ConfigError, match="no such model"):
                await client.ready()

    asyncio.run(main())


def test_crash_while_loading_says_how_it_ended():
    async def main():
        async with engine(crash=True) as client:
            with pytest.raises(EngineDead, match="exit code 3"):
                await client.ready()

    asyncio.run(main())


def test_streams_get_their_own_tokens_and_counts_return_to_zero():
    async def main():
        async with engine() as client:
            await client.ready()
            texts = ["one", "three and more", "two"]
            streams = [client.submit([request(client, "say:" + t)]) for t in texts]
            assert client.num_waiting == 3
            assert client.num_waiting_tokens == sum(4 + len(t) for t in texts)
            for text, stream in zip(texts, streams):
                tokens, finished = await collect(stream)
                assert bytes(t for _, t in tokens[:-1]).decode() == text
                assert [f.reason for f in finished] == [FinishReason.STOP]
            assert (client.num_waiting, client.num_running, client.num_waiting_tokens) == (0, 0, 0)
            assert client.num_admitted == client.ended["stop"] == 3

    asyncio.run(main())


def test_one_stream_for_several_requests_and_choices():
    async def main():
        async with engine() as client:
            await client.ready()
            a = request(client, "say:a", n=2)
            b = request(client, "say:bb")
            tokens, finished = await collect(client.submit([a, b]))
            assert sorted({h for h, _ in tokens}) == [a.handle, a.handle + 1, b.handle]
            assert len(finished) == 3

    asyncio.run(main())


def test_aborted_handles_end_at_once_and_are_gone_from_the_engine():
    async def main():
        async with engine() as client:
            await client.ready()
            added = request(client, "endless", n=2, max_tokens=20_000)
            stream = client.submit([added])
            await first(stream)
            client.abort([added.handle, added.handle + 1])
            await asyncio.wait_for(collect(stream), PATIENCE)
            assert client.num_running == 0
            assert client.ended["abort"] == client.num_admitted == 2
            steps = [-1]

            def stands_still():
                steps.append(client.stats.num_steps)
                return steps[-1] == steps[-2]

            await come(stands_still, every=0.1)

    asyncio.run(main())


def test_queue_bound():
    async def main():
        config = EngineConfig(scheduler=SchedulerConfig(max_num_queued_reqs=1))
        async with engine(config, max_num_seqs=1, step_seconds=0.02) as client:
            await client.ready()
            running = client.submit([request(client, "endless", max_tokens=20_000)])
            await first(running)
            client.submit([request(client, "say:waits")])
            with pytest.raises(QueueFull):
                client.submit([request(client, "say:too many")])

    asyncio.run(main())


def test_killed_engine_ends_streams_and_refuses():
    async def main():
        async with engine() as client:
            await client.ready()
            stream = client.submit([request(client, "endless", max_tokens=20_000)])
            await first(stream)
            begin = time.monotonic()
            os.kill(client.pid, signal.SIGKILL)
            with pytest.raises(EngineDead, match="signal 9"):
                await collect(stream)
            assert time.monotonic() - begin < TOLD
            await client.dead.wait()
            with pytest.raises(EngineDead):
                client.submit([request(client, "say:x")])
            assert client.num_running == 0

    asyncio.run(main())


def test_stopped_engine_is_unhealthy_and_recovers():
    async def main():
        async with engine() as client:
            await client.ready()
            stream = client.submit([request(client, "endless", max_tokens=20_000)])
            await first(stream)
            begin = time.monotonic()
            os.kill(client.pid, signal.SIGSTOP)
            with pytest.raises(EngineDead, match="not answered"):
                await collect(stream)
            assert time.monotonic() - begin < TOLD
            with pytest.raises(EngineDead):
                client.submit([request(client, "say:x")])
            os.kill(client.pid, signal.SIGCONT)
            await come(lambda: client.problem() is None)
            tokens, _ = await collect(client.submit([request(client, "say:back")]))
            assert len(tokens) == 5

    asyncio.run(main())


def test_step_beyond_its_deadline_ends_the_engine():
    async def main():
        config = EngineConfig(scheduler=SchedulerConfig(step_deadline=1.0))
        async with engine(config, hang_after=3) as client:
            await client.ready()
            stream = client.submit([request(client, "endless", max_tokens=20_000)])
            with pytest.raises(EngineDead, match="--step-deadline 1 s"):
                await asyncio.wait_for(collect(stream), PATIENCE)
            assert not client.alive

    asyncio.run(main())


def test_drain_finishes_what_runs_then_the_process_ends_without_alarm():
    async def main():
        async with engine() as client:
            await client.ready()
            stream = client.submit([request(client, "say:finish me")])
            client.drain()
            with pytest.raises(EngineDead, match="shutting down"):
                client.submit([request(client, "say:late")])
            tokens, _ = await collect(stream)
            assert len(tokens) == 10
            assert await asyncio.wait_for(client._child.wait(), PATIENCE) == ""
            await asyncio.sleep(0.05)
            assert client.alive

    asyncio.run(main())


def test_prefix_cache_reset_returns_the_engines_answer():
    async def main():
        async with engine() as client:
            await client.ready()
            assert await client.reset_prefix_cache() is True

    asyncio.run(main())
