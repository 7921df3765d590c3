"""Ten times as many requests as the server can serve: do those it takes still begin soon?

    python -m benchmarks.overload [--seconds 600] [--factor 10] [--mock] [--save-as overload]

Starts ``octavo serve --max-num-seqs 8 --max-queue-wait 0.5`` with the demo model (``--mock``: the
tests' mock engine, 20 ms a step), measures first-token times one by one and the rate that eight
clients get, and then sends requests at ten times that rate, each over a connection of its own,
streamed. Told are: the p95 first-token time of those that were accepted, against the unloaded p95 +
0.5 s + one step; how long a refusal took; and the memory of both processes over the time.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import uvloop

from benchmarks.report import save

PLACES = 8
MAX_WAIT = 0.5  # seconds
MOST_REFUSAL = 0.05
OUTPUT = (20, 60)  # tokens, uniform
PROMPT = "The quick brown fox jumps over the lazy dog, and number {} of them says that"
SAMPLE_SECONDS = 1.0


@dataclass
class Answers:
    """Seconds from the connection's beginning."""

    first: list[float] = field(default_factory=list)  # to the first event, of accepted ones
    refused: list[float] = field(default_factory=list)  # to the whole answer 429
    retry_after: list[int] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    ended: int = 0


class Load:
    """Requests to one server."""

    def __init__(self, url: str, seed: int = 1) -> None:
        self.host, port = url.removeprefix("http://").split(":")
        self.port = int(port)
        self.answers = Answers()
        self.output = OUTPUT
        self._draw = random.Random(seed)
        self._count = 0

    def _request(self) -> bytes:
        self._count += 1
        body = {
            "prompt": PROMPT.format(self._count),
            "max_tokens": self._draw.randint(*self.output),
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
        }
        content = json.dumps(body).encode()
        return (
            f"POST /v1/completions HTTP/1.1\r\nhost: {self.host}\r\nconnection: close\r\n"
            f"content-type: application/json\r\ncontent-length: {len(content)}\r\n\r\n"
        ).encode() + content

    async def one(self) -> None:
        began = time.perf_counter()
        writer = None
        try:
            reader, writer = await asyncio.open_connection(self.host, self.port)
            writer.write(self._request())
            await self._read(reader, began)
        except (OSError, asyncio.IncompleteReadError) as error:
            self.answers.failed.append(repr(error))
        finally:
            if writer is not None:
                writer.close()

    async def _read(self, reader: asyncio.StreamReader, began: float) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        status = int(head.split()[1])
        if status == 200:
            await reader.readuntil(b"data: ")
            self.answers.first.append(time.perf_counter() - began)
            rest = await reader.read()
            if b"[DONE]" in rest:
                self.answers.ended += 1
            else:
                self.answers.failed.append(rest[-200:].decode(errors="replace"))
            return
        body = await reader.read()
        if status == 429:
            self.answers.refused.append(time.perf_counter() - began)
            found = re.search(r"retry-after: (\d+)", head)
            self.answers.retry_after.append(int(found[1]) if found else -1)
        else:
            self.answers.failed.append(f"{status}: {body[:200]!r}")

    async def one_by_one(self, count: int) -> list[float]:
        """First-token times of so many that have the server for themselves."""
        self.output = (1, 2)
        for _ in range(count):
            await self.one()
        self.output = OUTPUT
        return self._taken().first

    async def closed(self, clients: int, seconds: float) -> float:
        """Requests per second that so many clients get, each with one at a time."""
        began = time.perf_counter()

        async def client() -> None:
            while time.perf_counter() - began < seconds:
                await self.one()

        await asyncio.gather(*(client() for _ in range(clients)))
        return self._taken().ended / (time.perf_counter() - began)

    async def open(self, rate: float, seconds: float) -> Answers:
        """Requests at random times, whatever becomes of those before."""
        began = due = time.perf_counter()
        tasks: set[asyncio.Task[None]] = set()
        while due - began < seconds:
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            task = asyncio.create_task(self.one())
            tasks.add(task)
            task.add_done_callback(tasks.discard)
            due += self._draw.expovariate(rate)
        await asyncio.gather(*tasks)
        return self._taken()

    def _taken(self) -> Answers:
        taken, self.answers = self.answers, Answers()
        return taken


def quantile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else float("nan")


def memory(pid: int) -> float:
    """MB that the process holds by itself (its private part: shared weights are not counted)."""
    status = Path(f"/proc/{pid}/status").read_text()
    found = re.search(r"RssAnon:\s+(\d+)", status)
    return int(found[1]) / 1024 if found else 0.0


def steps(url: str) -> tuple[float, float]:
    """Sum and count of the steps so far."""
    page = httpx.get(f"{url}/metrics").text
    found = [
        re.search(rf'octavo_step_seconds_{kind}{{.*part="total".*}} (\S+)', page)
        for kind in ("sum", "count")
    ]
    return tuple(float(match[1]) if match else 0.0 for match in found)  # type: ignore[return-value]


async def measure(url: str, pids: dict[str, int], seconds: float, factor: float) -> dict[str, Any]:
    load = Load(url)
    short = min(20.0, seconds)
    await load.one_by_one(5)
    unloaded = await load.one_by_one(100)
    sustainable = await load.closed(PLACES, short)
    sum_before, count_before = steps(url)
    samples: list[dict[str, float]] = []

    async def watch() -> None:
        began = time.perf_counter()
        while True:
            sample = {"seconds": round(time.perf_counter() - began, 1)}
            samples.append(
                {**sample, **{name: round(memory(pid), 1) for name, pid in pids.items()}}
            )
            await asyncio.sleep(SAMPLE_SECONDS)

    watcher = asyncio.create_task(watch())
    answers = await load.open(factor * sustainable, seconds)
    watcher.cancel()
    total, count = (b - a for a, b in zip((sum_before, count_before), steps(url)))
    step = total / max(count, 1)
    return told(unloaded, sustainable, answers, step, samples)


def told(
    unloaded: list[float],
    sustainable: float,
    answers: Answers,
    step: float,
    samples: list[dict[str, float]],
) -> dict[str, Any]:
    limit = quantile(unloaded, 0.95) + MAX_WAIT + step
    p95 = quantile(answers.first, 0.95)
    slowest = max(answers.refused, default=0.0)
    half = samples[len(samples) // 2 :]
    growth = {name: half[-1][name] - half[0][name] for name in samples[0] if name != "seconds"}
    return {
        "sustainable_requests_per_second": round(sustainable, 2),
        "unloaded_first_token_p95_ms": round(quantile(unloaded, 0.95) * 1e3, 1),
        "step_ms": round(step * 1e3, 2),
        "accepted": len(answers.first),
        "accepted_first_token_ms": {
            f"p{p}": round(quantile(answers.first, p / 100) * 1e3, 1) for p in (50, 95, 99)
        },
        "limit_ms": round(limit * 1e3, 1),
        "refused": len(answers.refused),
        "refused_ms": {
            **{f"p{p}": round(quantile(answers.refused, p / 100) * 1e3, 1) for p in (50, 95, 99)},
            "max": round(slowest * 1e3, 1),
        },
        "retry_after_seconds": sorted(set(answers.retry_after)),
        "failed": answers.failed[:5],
        "memory_mb": samples[:: max(1, len(samples) // 30)],
        "memory_growth_mb_in_second_half": {k: round(v, 1) for k, v in growth.items()},
        "holds": {
            "first_token": p95 <= limit,
            "refusals": quantile(answers.refused, 0.99) < MOST_REFUSAL,
            "memory": all(value < 8 for value in growth.values()),
            "no_failure": not answers.failed,
        },
    }


@contextmanager
def served(mock: bool) -> Iterator[tuple[str, dict[str, int]]]:
    """Address, and the processes by name."""
    if mock:
        from tests.server import mock_server

        engine = {"step_seconds": 0.02, "max_num_seqs": PLACES, "num_blocks": 4096}
        limits = {"max_queue_wait": MAX_WAIT}
        quiet = {"disable_uvicorn_access_log": True, "disable_log_stats": True}
        with mock_server.start(engine, quiet, limits) as server:
            yield server.url, {"api": server.process.pid, "engine": server.engine_pid}
        return
    from tests.fixtures import server as real

    # A cache so small that all of it has been touched before the overload: pages that the kernel
    # gives on first use are no growth.
    flags = ["--max-num-seqs", str(PLACES), "--max-queue-wait", str(MAX_WAIT)]
    flags += ["--kv-cache-memory-bytes", "64MiB"]
    quiet_flags = ["--disable-uvicorn-access-log", "--disable-log-stats"]
    with real.start("smollm2-135m", *flags, *quiet_flags) as running:
        (engine_pid,) = running.children()
        yield running.url, {"api": running.process.pid, "engine": engine_pid}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=600.0, help="of overload")
    parser.add_argument("--factor", type=float, default=10.0, help="times the sustainable rate")
    parser.add_argument("--mock", action="store_true", help="the tests' mock engine")
    parser.add_argument("--save-as", help="name of a file in results/")
    options = parser.parse_args()
    with served(options.mock) as (url, pids), contextlib.suppress(KeyboardInterrupt):
        found = uvloop.run(measure(url, pids, options.seconds, options.factor))
    found = {"mock": options.mock, "seconds": options.seconds, "factor": options.factor, **found}
    print(json.dumps(found, indent=1))
    if options.save_as:
        save(options.save_as, found)


if __name__ == "__main__":
    main()
