"""Work in threads: what comes back, what a client that leaves ends, how much may wait."""

from __future__ import annotations

import asyncio
import threading

import pytest

from octavo.server import workers as module
from octavo.server.errors import ClientGone
from octavo.server.workers import NUM_THREADS, Workers
from octavo.types import InvalidRequest, QueueFull


async def stays() -> dict[str, str]:
    await asyncio.sleep(60)
    raise AssertionError


async def leaves() -> dict[str, str]:
    return {"type": "http.disconnect"}


def fails() -> None:
    raise InvalidRequest("no", "prompt")


def test_results_and_errors_come_back():
    async def run() -> None:
        workers = Workers()
        assert await workers.run(lambda: 3, 1) == 3
        assert await workers.run(lambda: 3, 1, stays) == 3
        with pytest.raises(InvalidRequest, match="no"):
            await workers.run(fails, 1, stays)
        assert not workers.close()

    asyncio.run(run())


def test_work_that_has_not_begun_is_dropped_when_its_client_leaves():
    async def run() -> None:
        workers, release, done = Workers(), threading.Event(), []
        holding = [asyncio.ensure_future(workers.run(release.wait, 1)) for _ in range(NUM_THREADS)]
        await asyncio.sleep(0.05)
        with pytest.raises(ClientGone):
            await workers.run(lambda: done.append("ran"), 1, leaves)
        assert workers.close()  # the others still run
        release.set()
        await asyncio.gather(*holding)
        assert not done and not workers.close()

    asyncio.run(run())


def test_more_than_may_wait_is_refused_and_one_may_always(monkeypatch):
    monkeypatch.setattr(module, "MOST_WAITING", 100)

    async def run() -> None:
        workers, release = Workers(), threading.Event()
        held = asyncio.ensure_future(workers.run(release.wait, 200))
        await asyncio.sleep(0)
        with pytest.raises(QueueFull):
            await workers.run(lambda: None, 1)
        release.set()
        await held
        await asyncio.sleep(0)
        assert await workers.run(lambda: 1, 50) == 1
        workers.close()

    asyncio.run(run())
