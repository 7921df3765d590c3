"""A soak: many streaming clients with random aborts against a real server, for minutes.

    python -m benchmarks.soak [--seconds 300] [--clients 200] [--model R]

Every client sends one request after the other; some leave before the first token, some in
mid-stream. What must hold: no error; every finished stream is complete and, for the prompts whose
answer is known, right; in the end nothing runs, waits or holds a block; counters add up; the
processes have not grown. Writes benchmarks/results/soak.json; exits 1 if something did not hold.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks.report import save
from tests.fixtures import models
from tests.fixtures.server import Server, start

ABORT_SHARE = 0.3
SAMPLE_SECONDS = 2.0
GROWTH_ALLOWED = 0.05  # of resident memory, from the second quarter of the run to the last
GROWTH_ALLOWED_BYTES = 24 << 20


@dataclass
class Tally:
    """What the clients saw."""

    ends: Counter[str] = field(default_factory=Counter)  # stop, length, left, left early
    errors: list[str] = field(default_factory=list)
    tokens: int = 0
    checked: int = 0
    wrong: int = 0
    memory: list[tuple[float, int]] = field(default_factory=list)  # (time, resident bytes)


@dataclass(frozen=True)
class Golden:
    """A prompt whose greedy answer was heard while nothing else ran."""

    prompt: list[int]
    token_ids: list[int]


def make_goldens(server: Server, rng: random.Random, vocabulary: int) -> list[Golden]:
    goldens = []
    for length in (3, 17, 40, 64, 90):
        prompt = [rng.randrange(20, vocabulary) for _ in range(length)]
        answer = server.complete(prompt, max_tokens=24)
        goldens.append(Golden(prompt, answer["choices"][0]["token_ids"]))
    return goldens


def make_body(rng: random.Random, stem: list[int], vocabulary: int) -> dict[str, Any]:
    """A third share a beginning; sizes, sampling and n vary."""
    tail = [rng.randrange(20, vocabulary) for _ in range(rng.randint(1, 120))]
    prompt = stem[: rng.randint(1, len(stem))] + tail if rng.random() < 0.33 else tail
    return {
        "prompt": prompt,
        "max_tokens": rng.randint(1, 64),
        "temperature": rng.choice((0, 0.7, 1.0)),
        "n": rng.choice((1, 1, 1, 1, 2)),
        "ignore_eos": rng.random() < 0.5,
    }


class Client:
    def __init__(
        self, number: int, session: aiohttp.ClientSession, goldens: list[Golden], vocabulary: int
    ) -> None:
        self.rng = random.Random(number)
        self.session = session
        self.goldens = goldens
        self.vocabulary = vocabulary
        self.stem = [random.Random(0).randrange(20, vocabulary) for _ in range(100)]

    async def live(self, until: float, tally: Tally) -> None:
        while time.monotonic() < until:
            try:
                await self.request(tally)
            except Exception as error:
                tally.errors.append(f"{type(error).__name__}: {error}")
                await asyncio.sleep(0.1)

    async def request(self, tally: Tally) -> None:
        golden = self.rng.choice(self.goldens) if self.rng.random() < 0.2 else None
        if golden is not None:
            body: dict[str, Any] = {"prompt": golden.prompt, "max_tokens": 24, "temperature": 0}
        else:
            body = make_body(self.rng, self.stem, self.vocabulary)
        options = {"include_usage": True}
        body |= {"stream": True, "stream_options": options, "return_token_ids": True}
        patience = self.rng.random() * 0.5 if self.rng.random() < ABORT_SHARE else None
        leave_after = self.rng.randint(1, 10) if patience and self.rng.random() < 0.7 else None
        try:
            async with asyncio.timeout(patience if leave_after is None else None):
                await self.stream(body, golden, leave_after, tally)
        except TimeoutError:
            tally.ends["left early"] += 1

    async def stream(
        self, body: dict[str, Any], golden: Golden | None, leave_after: int | None, tally: Tally
    ) -> None:
        """Reads an answer to its end, or leaves after so many events."""
        ids: dict[int, list[int]] = {}
        reasons: dict[int, str] = {}
        usage: dict[str, int] = {}
        done, events = False, 0
        async with self.session.post("/v1/completions", json=body) as response:
            if response.status != 200:
                raise RuntimeError(f"HTTP {response.status}: {(await response.text())[:200]}")
            async for line in response.content:
                if not line.startswith(b"data: "):
                    continue
                if line.strip() == b"data: [DONE]":
                    done = True
                    break
                event = json.loads(line[6:])
                if "error" in event:
                    raise RuntimeError(f"error event: {event['error']}")
                usage = event.get("usage") or usage
                for choice in event["choices"]:
                    ids.setdefault(choice["index"], []).extend(choice.get("token_ids") or [])
                    if choice.get("finish_reason"):
                        reasons[choice["index"]] = choice["finish_reason"]
                events += 1
                if leave_after is not None and events >= leave_after:
                    tally.ends["left"] += 1
                    response.close()
                    return
        if not done:
            raise RuntimeError("the stream broke off before data: [DONE]")
        num_tokens = sum(map(len, ids.values()))
        if len(reasons) != body.get("n", 1) or usage.get("completion_tokens") != num_tokens:
            raise RuntimeError(f"an incomplete answer: {reasons}, {usage}, {num_tokens} tokens")
        tally.tokens += num_tokens
        tally.ends.update(reasons.values())
        if golden is not None:
            tally.checked += 1
            tally.wrong += ids[0] != golden.token_ids


def resident_bytes(server: Server) -> int:
    """Of the server and its engine."""
    total = 0
    for pid in (server.process.pid, *server.children()):
        with suppress(OSError):
            total += int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096
    return total


async def watch(server: Server, until: float, tally: Tally) -> None:
    began = time.monotonic()
    while time.monotonic() < until:
        tally.memory.append((time.monotonic() - began, resident_bytes(server)))
        shown = f"{time.monotonic() - began:5.0f} s  {sum(tally.ends.values())} ended  "
        shown += f"{len(tally.errors)} errors  {tally.memory[-1][1] / 2**20:.0f} MiB"
        print(shown, end="\r", flush=True)
        await asyncio.sleep(SAMPLE_SECONDS)
    print()


async def crowd(
    server: Server, seconds: float, clients: int, goldens: list[Golden], vocabulary: int
) -> Tally:
    tally, until = Tally(), time.monotonic() + seconds
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=30)
    async with aiohttp.ClientSession(
        server.url, connector=aiohttp.TCPConnector(limit=0), timeout=timeout
    ) as session:
        lives = [Client(k, session, goldens, vocabulary).live(until, tally) for k in range(clients)]
        await asyncio.gather(watch(server, until, tally), *lives)
    return tally


def growth(memory: list[tuple[float, int]]) -> tuple[int, int]:
    """Median resident bytes in the second and in the last quarter of the run."""
    values = [size for _, size in memory]
    quarter = max(1, len(values) // 4)
    second = values[quarter : 2 * quarter] or values
    return int(statistics.median(second)), int(statistics.median(values[-quarter:]))


def judge(tally: Tally, before: dict[str, float], after: dict[str, float]) -> dict[str, bool]:
    """What must hold at the end, by name. ``before`` and ``after``: metrics of an idle server."""

    def grown(name: str) -> float:
        return after[name] - before[name]

    early, late = growth(tally.memory)
    finished = sum(tally.ends[reason] for reason in ("stop", "length"))
    left = tally.ends["left"] + tally.ends["left early"]  # each had one or two choices
    ended = grown("vllm:request_success_total")
    return {
        "no error": not tally.errors,
        "known answers are right": tally.wrong == 0 and tally.checked > 0,
        "nothing runs or waits": after["vllm:num_requests_running"] == 0
        and after["vllm:num_requests_waiting"] == 0,
        "no block is held": after["vllm:kv_cache_usage_perc"] == 0,
        "every request is counted once": finished <= ended <= finished + 2 * left,
        "every token is counted": grown("vllm:generation_tokens_total") >= tally.tokens,
        "memory is flat": late - early <= max(GROWTH_ALLOWED_BYTES, int(early * GROWTH_ALLOWED)),
    }


def soak(model: str, seconds: float, clients: int) -> dict[str, Any]:
    path = models.path(model)
    flags = ["--max-queue-wait", "600", "--dtype", "float32"]
    if model.startswith("R"):
        flags += ["--kv-cache-memory-bytes", "2MiB"]  # small, so that preemption happens
    vocabulary = 320 if model.startswith("R") else 49152
    with start(path, *flags) as server:
        goldens = make_goldens(server, random.Random(1), vocabulary)
        before = server.wait_idle()
        tally = asyncio.run(crowd(server, seconds, clients, goldens, vocabulary))
        after = server.wait_idle(timeout=10)
        health = server.client.get("/health").status_code
        checks = judge(tally, before, after) | {"healthy": health == 200}
    early, late = growth(tally.memory)
    names = ("num_preemptions_total", "generation_tokens_total", "prefix_cache_hits_total")
    return {
        "model": model,
        "seconds": seconds,
        "clients": clients,
        "ends": dict(tally.ends),
        "tokens_received": tally.tokens,
        "known_answers_checked": tally.checked,
        "known_answers_wrong": tally.wrong,
        "errors": len(tally.errors),
        "first_errors": tally.errors[:5],
        "resident_mib": {"second_quarter": early >> 20, "last_quarter": late >> 20},
        "engine": {name: after[f"vllm:{name}"] for name in names},
        "checks": checks,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--model", default="R", help="a name of tests/fixtures/models.py")
    options = parser.parse_args()
    figures = soak(options.model, options.seconds, options.clients)
    for key in ("ends", "tokens_received", "errors", "first_errors", "resident_mib", "engine"):
        print(f"{key}: {figures[key]}")
    for name, held in figures["checks"].items():
        print(f"{'ok    ' if held else 'FAILED'} {name}")
    print(f"saved {save('soak', figures)}")
    sys.exit(0 if all(figures["checks"].values()) else 1)


if __name__ == "__main__":
    main()
