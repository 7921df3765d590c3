"""Light histograms for what is measured in passing; their bounds are vLLM's."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from functools import lru_cache

from octavo.engine.messages import EngineStats

FIRST_TOKEN_BUCKETS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40,
    80, 160, 640, 2560,
)  # fmt: skip
PER_TOKEN_BUCKETS = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5,
    7.5, 10, 20, 40, 80,
)  # fmt: skip
REQUEST_BUCKETS = (
    0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680,
)  # fmt: skip
STEP_BUCKETS = (0.0001, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 5, 30)
STEP_TOKEN_BUCKETS = (1, 8, *(2**k for k in range(4, 15)))
N_BUCKETS = (1, 2, 5, 10, 20)


def token_buckets(limit: int) -> tuple[int, ...]:
    """1-2-5 up to ``limit``, e.g. 1, 2, 5, 10, 20, 50, 100 for 100."""
    powers = range(len(str(limit)))
    return tuple(v for p in powers for m in (1, 2, 5) if (v := m * 10**p) <= limit)


class Histogram:
    """Counts per bucket (upper bounds, inclusive) and the sum."""

    __slots__ = ("bound_texts", "bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.bound_texts = _bound_texts(tuple(bounds))
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float, count: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += count
        self.total += value * count


@lru_cache(64)
def _bound_texts(bounds: tuple[float, ...]) -> tuple[str, ...]:
    """The label ``le`` of each bucket."""
    return (*(f'"{float(bound)}"' for bound in bounds), '"+Inf"')


class StepHistograms:
    """Of one engine's steps: tokens, and seconds of the whole and of scheduling."""

    def __init__(self) -> None:
        self.tokens = Histogram(STEP_TOKEN_BUCKETS)
        self.seconds = {"schedule": Histogram(STEP_BUCKETS), "total": Histogram(STEP_BUCKETS)}
        self._last_step = 0

    def observe(self, stats: EngineStats) -> None:
        if stats.num_steps == self._last_step:
            return  # news without a step
        self._last_step = stats.num_steps
        self.tokens.observe(stats.step_tokens)
        self.seconds["total"].observe(stats.step_seconds)
        self.seconds["schedule"].observe(stats.schedule_seconds)
