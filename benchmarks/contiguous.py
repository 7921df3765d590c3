"""KV memory under contiguous allocation, by rule from a workload's lengths.

The rules are those of the systems that paging replaced. A request reserves one contiguous run of
token places before it starts and gives it back when it ends:

    max      the longest context the server allows, for every request
    power2   the next power of two above prompt + output
    exact    prompt + output, as if the output's length were known beforehand

First fit, first come first served; a request that finds no run waits, and so do those behind it.
One step is one output token for every running request; prompts are free. (``transformers`` grows
its tensors instead of reserving, but pads every row of a batch to the longest: see ``padded``.)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Lengths:
    prompt: int
    output: int

    @property
    def total(self) -> int:
        return self.prompt + self.output


@dataclass(frozen=True)
class Use:
    """Means over the steps in which requests waited (the memory was wanted). Shares of the pool:
    ``used`` holds a token, ``internal`` is reserved and holds none, ``external`` is free in pieces
    that the next request does not fit into although their sum would do, ``idle`` is the rest."""

    used: float
    internal: float
    external: float
    running: float
    steps: int

    @property
    def idle(self) -> float:
        return 1.0 - self.used - self.internal - self.external


Rule = Callable[[Lengths], int]


def rules(max_model_len: int) -> dict[str, Rule]:
    return {
        "max": lambda lengths: max_model_len,
        "power2": lambda lengths: 1 << (lengths.total - 1).bit_length(),
        "exact": lambda lengths: lengths.total,
    }


@dataclass
class _Run:
    start: int
    size: int
    lengths: Lengths
    age: int = 0


def simulate(requests: list[Lengths], pool: int, rule: Rule) -> Use:
    """``pool`` token places; all requests wait at the start."""
    waiting = deque(requests)
    running: list[_Run] = []
    sums = [0.0, 0.0, 0.0, 0.0]
    steps = counted = 0
    while waiting or running:
        while waiting:
            start = _first_fit(running, pool, rule(waiting[0]))
            if start is None:
                break
            running.append(_Run(start, rule(waiting[0]), waiting.popleft()))
        if waiting:
            reserved = sum(run.size for run in running)
            used = sum(run.lengths.prompt + run.age for run in running)
            free = pool - reserved
            external = free if free >= rule(waiting[0]) else 0
            for index, value in enumerate((used, reserved - used, external)):
                sums[index] += value / pool
            sums[3] += len(running)
            counted += 1
        for run in running:
            run.age += 1
        running = [run for run in running if run.age < run.lengths.output]
        steps += 1
    return Use(*(total / max(1, counted) for total in sums), steps=steps)


def _first_fit(running: list[_Run], pool: int, size: int) -> int | None:
    at = 0
    for run in sorted(running, key=lambda run: run.start):
        if run.start - at >= size:
            return at
        at = run.start + run.size
    return at if pool - at >= size else None


def padded(requests: list[Lengths], batch: int) -> float:
    """Share of a static batch's token places that hold a token of their own request, at its end:
    every row is as wide as the longest prompt and as long as the longest answer."""
    used = places = 0
    for start in range(0, len(requests), batch):
        rows = requests[start : start + batch]
        width = max(row.prompt for row in rows) + max(row.output for row in rows)
        used += sum(row.total for row in rows)
        places += width * len(rows)
    return used / places
