"""VerifyCosts: what guesses add to a decode step on this machine, learnt while serving.

Two tables of averages: steps without guesses by their rows, steps with some by their tokens (rows
and guesses), in which a draft model's own time is included. Between entries times are interpolated;
beyond the largest a guess is taken to be free until one was tried.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Float64 = NDArray[np.float64]

SMOOTHING = 0.2
# The first steps of a size may compile or capture something: the shortest of so many counts. Later
# ones count as so many times the average at most.
FIRST, MOST_LIKELY = 3, 2.0
EXACT = 32  # sizes up to this have an entry each, larger ones share (eight to a power of two)


class VerifyCosts:
    """Implements ``core.speculation.VerifyCost`` from observed steps."""

    def __init__(self) -> None:
        self._plain = _Table()
        self._drafted = _Table()
        self.saved_seconds = 0.0  # against steps without guesses that draw as many tokens, ever

    def observe(self, num_rows: int, num_guesses: int, num_drawn: int, seconds: float) -> None:
        """A finished step of decoding rows alone, which drew so many tokens."""
        if not num_guesses:
            self._plain.observe(num_rows, seconds)
            return
        self._drafted.observe(num_rows + num_guesses, seconds)
        if self._plain:
            plain = float(self._plain.at(np.array([float(num_rows)]))[0])
            self.saved_seconds += num_drawn / num_rows * plain - seconds

    def seconds(self, num_rows: int, num_guesses: Float64) -> Float64 | None:
        if not self._plain.knows(num_rows):
            return None
        plain = self._plain.at(np.array([float(num_rows)]))[0]
        if not self._drafted:
            return np.full(len(num_guesses), plain)
        drafted = np.maximum(self._drafted.at(num_rows + num_guesses), plain)
        found: Float64 = np.where(num_guesses > 0, drafted, plain)
        return found


class _Table:
    """Seconds by size; larger sizes never take less."""

    def __init__(self) -> None:
        self._averages: dict[int, float] = {}
        self._counts: dict[int, int] = {}
        self._sizes = self._seconds = np.zeros(0)

    def __bool__(self) -> bool:
        return bool(self._averages)

    def knows(self, size: int) -> bool:
        return _rounded(size) in self._averages

    def observe(self, size: int, seconds: float) -> None:
        size = _rounded(size)
        old = self._averages.get(size, seconds)
        count = self._counts[size] = self._counts.get(size, 0) + 1
        if count <= FIRST:
            self._averages[size] = min(old, seconds)
        else:
            self._averages[size] = old + SMOOTHING * (min(seconds, MOST_LIKELY * old) - old)
        entries = np.array(sorted(self._averages.items()))
        self._sizes, self._seconds = entries[:, 0], np.maximum.accumulate(entries[:, 1])

    def at(self, sizes: Float64) -> Float64:
        return np.interp(sizes, self._sizes, self._seconds)


def _rounded(size: int) -> int:
    step = 1 << max(0, size.bit_length() - 4) if size > EXACT else 1
    return -(-size // step) * step
