"""Replicas that are killed and stopped at random under load: answers are whole, counts add up."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import time

import pytest

from octavo.config import SchedulerConfig
from octavo.engine import replica as replica_module
from octavo.types import EngineDead
from tests.engine.test_client import collect
from tests.engine.test_replicas import check_counts, replicas, submit
from tests.fixtures.waiting import PATIENCE

pytestmark = pytest.mark.net
SECONDS = 20.0


async def ask(client, rng, name, until, outcomes):
    """One request after the other; some are aborted."""
    number = 0
    while time.monotonic() < until:
        number += 1
        text = f"{name}/{number} " * rng.randint(1, 15)
        try:
            stream = submit(client, f"say:{text}", n=rng.choice([1, 1, 2]), max_tokens=300)
            if rng.random() < 0.1:
                await asyncio.sleep(0.1 * rng.random())
                client.abort(list(stream.open))
                continue
            tokens, finished = await asyncio.wait_for(collect(stream), PATIENCE)
        except EngineDead:
            outcomes["lost"] += 1
            await asyncio.sleep(0.05)
            continue
        outcomes["whole"] += 1
        said = {end.handle: bytearray() for end in finished}
        for handle, token in tokens:
            said[handle] += bytes([token]) if token < 256 else b""
        assert len(said) == len(finished)
        assert {raw.decode() for raw in said.values()} == {text}


async def trouble(client, rng, until):
    """Kills and stops engines, but never the last that serves."""
    stopped = []
    while time.monotonic() < until:
        await asyncio.sleep(0.8 * rng.random())
        serving = [replica.client.pid for replica in client.replicas if replica.serves]
        if len(serving) < 2:
            continue
        pid = rng.choice(serving)
        os.kill(pid, signal.SIGKILL if rng.random() < 0.6 else signal.SIGSTOP)
        stopped.append(pid)
        if rng.random() < 0.7:
            with contextlib.suppress(ProcessLookupError):
                os.kill(stopped.pop(0), signal.SIGCONT)
    for pid in stopped:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


@pytest.mark.parametrize("seed", [1, 2])
def test_what_is_answered_is_whole_and_every_sequence_is_counted_once(seed, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    for name, value in (("FIRST_PAUSE", 0.2), ("LONGEST_PAUSE", 0.2), ("MOST_RESTARTS", 1000)):
        monkeypatch.setattr(replica_module, name, value)
    outcomes = {"whole": 0, "lost": 0}

    async def main():
        rng = random.Random(seed)
        limits = SchedulerConfig(max_queue_wait=1000.0)
        async with replicas(3, limits, max_num_seqs=6, step_seconds=0.005) as client:
            until = time.monotonic() + SECONDS
            asking = [ask(client, rng, str(i), until, outcomes) for i in range(20)]
            await asyncio.gather(trouble(client, rng, until - 4), *asking)
            assert client.num_open == 0
            check_counts(client)
            for replica in client.replicas:
                accounts = replica.client._accounts
                assert not (accounts.num_pending_tokens or accounts.num_waiting)
            assert sum(replica.restarts.count for replica in client.replicas) > 3
            assert sum(replica.ended["retried"] for replica in client.replicas) > 3

    asyncio.run(main())
    assert outcomes["whole"] > 50
