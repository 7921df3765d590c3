"""When places become free: the wait of a request that finds all of them taken.

A running sequence is expected to end after as many further tokens as those of late that came as far
as it had left, at most its ``max_tokens``; a token takes a step. Nothing here is exact, and all of
it errs on the late side: the first of several to end is earlier than each alone is expected to.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import deque
from collections.abc import Iterable
from itertools import accumulate

# What outputs are taken to be long until some have ended.
PRIOR_TOKENS = 256
MOST_LENGTHS = 256  # of the latest outputs
STEP_SHARE = 0.05  # of a new step in the mean


class PlaceForecast:
    """Fed by the client of an engine, asked by it for requests that may have to wait."""

    def __init__(self) -> None:
        self._latest: deque[int] = deque()  # output tokens of ended sequences, in order of time
        self._sorted: list[int] = []
        self.step_seconds = 0.0  # mean of late; 0.0 before the first

    def on_step(self, seconds: float) -> None:
        if not self.step_seconds:
            self.step_seconds = seconds
        self.step_seconds += STEP_SHARE * (seconds - self.step_seconds)

    def on_end(self, num_tokens: int) -> None:
        """A sequence ended by itself."""
        self._latest.append(num_tokens)
        insort(self._sorted, num_tokens)
        if len(self._latest) > MOST_LENGTHS:
            del self._sorted[bisect_right(self._sorted, self._latest.popleft()) - 1]

    def waits(self, running: Iterable[tuple[int, int]]) -> PlaceWaits:
        """From the (output tokens, max_tokens) of each running sequence."""
        lengths = self._sorted or [PRIOR_TOKENS]
        sums = [0, *accumulate(reversed(lengths))]  # [k]: of the k longest
        steps = []
        for num_tokens, max_tokens in running:
            num_longer = len(lengths) - bisect_right(lengths, num_tokens)
            if num_longer:
                expected = sums[num_longer] / num_longer - num_tokens
            else:
                expected = max(num_tokens, 1)  # longer than all of late: as much again
            steps.append(min(expected, max_tokens - num_tokens))
        step = self.step_seconds
        return PlaceWaits([step * (n + 1) for n in sorted(steps)], step * sums[-1] / len(lengths))


class PlaceWaits:
    """Seconds until places become free, as of one moment. ``free``: of each running sequence, in
    order; ``service``: that a sequence keeps its place."""

    def __init__(self, free: list[float], service: float) -> None:
        self._free = free
        self._service = service

    def of(self, position: int) -> float:
        """Until the ``position``-th place is free, the first being 0; more than run now wait for
        others that have waited. 0.0 for a negative one: that place is free."""
        if position < 0 or not self._free:
            return 0.0
        rounds, place = divmod(position, len(self._free))
        return self._free[place] + rounds * self._service
