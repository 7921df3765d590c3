"""Hostile requests by the thousand against every POST route of a real server.

    python -m benchmarks.fuzz [--bodies 2000] [--seed 1] [--model R]

What must hold: no answer is 5xx, none takes five seconds, refusals are JSON, no request is smuggled
in; after each block of 50 the golden request still gives the same bytes and /health is 200. Writes
benchmarks/results/fuzz.json; exits 1 if something did not hold.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx

from benchmarks.hostile import Attack, Hostile
from benchmarks.report import save
from tests.fixtures import models
from tests.fixtures.server import Server, start

BLOCK = 50
AT_ONCE = 4
LONGEST = 5.0  # seconds that an answer may take
PATIENCE = 0.3  # seconds that a request which the server may wait for is kept open
GOLDEN = {"prompt": "the rain in", "max_tokens": 8, "temperature": 0, "return_token_ids": True}
FLAGS = ("--dtype", "float32", "--max-model-len", "256", "--kv-cache-memory-bytes", "8MiB")


@dataclass
class Tally:
    """What one route answered: statuses by kind of attack, and every fault with how it was made."""

    statuses: Counter[str] = field(default_factory=Counter)
    kinds: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    slowest: float = 0.0
    goldens: int = 0


async def send(port: int, attack: Attack) -> tuple[bytes, float, bool]:
    """All that came back, the seconds until the connection's end, and whether it was reset: a
    server that closes with a part of the body unread may take its own answer back by that.
    TimeoutError for a hang."""
    began = time.monotonic()
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 26)
    limit = PATIENCE if attack.incomplete else LONGEST
    received, reset = bytearray(), False
    try:
        async with asyncio.timeout(LONGEST):
            try:
                for part in attack.parts:
                    writer.write(part)
                    await writer.drain()
            except ConnectionError:
                reset = True
            try:
                async with asyncio.timeout(limit):
                    while data := await reader.read(1 << 20):
                        received += data
            except ConnectionError:
                reset = True
            except TimeoutError:
                if not attack.incomplete:
                    raise
    finally:
        writer.transport.abort()
    return bytes(received), time.monotonic() - began, reset


def answers(received: bytes) -> Iterator[tuple[int, bytes, bytes]]:
    """(status, head, body) of each HTTP answer, interim ones left out."""
    starts = [m.start() for m in re.finditer(rb"HTTP/1\.[01] \d{3} ", received)]
    for begin, end in zip(starts, [*starts[1:], len(received)]):
        head, _, body = received[begin:end].partition(b"\r\n\r\n")
        status = int(head.split()[1])
        if status >= 200:
            yield status, head.lower(), body


def judge(attack: Attack, received: bytes, reset: bool) -> tuple[list[str], str | None]:
    """Statuses of an attack's answers, and what is wrong with them."""
    found = [*answers(received)]
    statuses = [str(status) for status, _, _ in found] or ["reset" if reset else "none"]
    if not found and not attack.incomplete and not reset:
        return statuses, f"no answer, but {received[:100]!r}"
    if len(found) > attack.most_answers:
        return statuses, f"{len(found)} answers to {attack.most_answers} requests"
    for status, head, body in found:
        if status >= 500:
            return statuses, f"{status}: {body[:300]!r}"
        if b'"server_error"' in body:
            return statuses, f"an error event: {body[-300:]!r}"
        if status >= 400 and b"application/json" in head and b"chunked" not in head:
            try:
                error = json.loads(body, parse_constant=_refuse)["error"]
                assert isinstance(error["message"], str) and error["message"]
            except (ValueError, KeyError, TypeError, AssertionError) as fault:
                if body:  # HEAD has none
                    return statuses, f"{status} with a broken body ({fault!r}): {body[:200]!r}"
    return statuses, None


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


async def block(port: int, made: list[tuple[str, Attack]], tally: Tally) -> None:
    """Sends attacks, a few at once. Each comes with the words that tell how to make it again."""
    gate = asyncio.Semaphore(AT_ONCE)

    async def one(name: str, attack: Attack) -> None:
        async with gate:
            tally.kinds[attack.kind] += 1
            try:
                received, seconds, reset = await send(port, attack)
            except TimeoutError:
                tally.statuses["hang"] += 1
                tally.faults.append(f"{name}: no end after {LONGEST} s")
                return
            tally.slowest = max(tally.slowest, seconds)
            statuses, fault = judge(attack, received, reset)
            tally.statuses.update(statuses)
            if fault:
                tally.faults.append(f"{name}: {fault}")

    await asyncio.gather(*(one(name, attack) for name, attack in made))


def golden_of(client: httpx.Client) -> bytes:
    """The answer's choices as bytes. Raises if the server is not healthy."""
    answer = client.post("/v1/completions", json=GOLDEN)
    assert answer.status_code == 200, answer.text
    assert client.get("/health").status_code == 200
    return json.dumps(answer.json()["choices"]).encode()


def fuzz(
    client: httpx.Client,
    port: int,
    bodies: int,
    seed: int,
    told: Callable[[str], None] = lambda text: None,
) -> dict[str, Tally]:
    """``bodies`` attacks on each POST route, in blocks of 50, with a golden request after each."""
    hostile = Hostile(client.get("/openapi.json").json())
    golden, tallies = golden_of(client), {}
    for route in hostile.routes:
        tally = tallies[route] = Tally()
        for first in range(0, bodies, BLOCK):
            made = []
            for number in range(first, min(bodies, first + BLOCK)):
                attack = hostile.attack(route, random.Random(f"{seed} {route} {number}"))
                made.append((f"{route} seed {seed} number {number} ({attack.kind})", attack))
            asyncio.run(block(port, made, tally))
            try:
                if golden_of(client) != golden:
                    tally.faults.append(f"{route} block {first}: another golden answer")
                tally.goldens += 1
            except (AssertionError, httpx.HTTPError) as error:
                tally.faults.append(f"{route} block {first}: {error!r}")
            told(f"{route}: {first + len(made)} sent, {len(tally.faults)} faults")
    return tallies


def idle(server: Server) -> dict[str, bool]:
    """What must be so when all is over."""
    metrics = server.wait_idle()
    return {
        "nothing runs or waits": metrics["vllm:num_requests_running"] == 0,
        "no block is held": metrics["vllm:kv_cache_usage_perc"] == 0,
        "no exception was logged": "Traceback" not in server.log,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bodies", type=int, default=2000, help="for each POST route")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--model", default="R", help="a name of tests/fixtures/models.py")
    options = parser.parse_args()
    began = time.monotonic()
    with start(models.path(options.model), *FLAGS, clean=False) as server:
        tell = lambda text: print(text, end="\r", flush=True)  # noqa: E731
        tallies = fuzz(server.client, server.port, options.bodies, options.seed, tell)
        print()
        checks = idle(server)
    figures: dict[str, Any] = {"seconds": round(time.monotonic() - began), "seed": options.seed}
    figures["routes"] = {
        route: {
            "sent": sum(tally.kinds.values()),
            "goldens": tally.goldens,
            "statuses": dict(sorted(tally.statuses.items())),
            "kinds": dict(sorted(tally.kinds.items())),
            "slowest_seconds": round(tally.slowest, 3),
            "faults": len(tally.faults),
            "first_faults": tally.faults[:5],
        }
        for route, tally in tallies.items()
    }
    checks["no fault"] = not any(tally.faults for tally in tallies.values())
    figures["checks"] = checks
    for route, found in figures["routes"].items():
        print(route, found["statuses"], *found["first_faults"], sep="\n    ")
    for name, held in checks.items():
        print(f"{'ok    ' if held else 'FAILED'} {name}")
    print(f"saved {save('fuzz', figures)}")
    sys.exit(0 if all(checks.values()) else 1)


if __name__ == "__main__":
    main()
