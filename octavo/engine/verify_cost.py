"""VerifyCosts: what guesses add to a decode step on this machine, learnt while serving.

Two tables of medians: steps without guesses by their rows, steps with some by their tokens (rows
and guesses), in which a draft model's own time is included. Between entries times are interpolated;
beyond the largest a guess is taken to be free until one was tried.
"""

from __future__ import annotations

from collections import deque
from statistics import median

import numpy as np
from numpy.typing import NDArray

Float64 = NDArray[np.float64]

# A size's entry is the median of its last steps: of an average, one step that waited for something
# else would be a part for long. Of its first ones, which may compile something, the shortest.
KEPT, FIRST = 9, 3
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
        self._steps: dict[int, deque[float]] = {}
        self._medians: dict[int, float] = {}
        self._sizes = self._seconds = np.zeros(0)

    def __bool__(self) -> bool:
        return bool(self._medians)

    def knows(self, size: int) -> bool:
        return _rounded(size) in self._medians

    def observe(self, size: int, seconds: float) -> None:
        size = _rounded(size)
        steps = self._steps.setdefault(size, deque(maxlen=KEPT))
        steps.append(seconds)
        self._medians[size] = min(steps) if len(steps) <= FIRST else median(steps)
        entries = np.array(sorted(self._medians.items()))
        self._sizes, self._seconds = entries[:, 0], np.maximum.accumulate(entries[:, 1])

    def at(self, sizes: Float64) -> Float64:
        return np.interp(sizes, self._sizes, self._seconds)


def _rounded(size: int) -> int:
    step = 1 << max(0, size.bit_length() - 4) if size > EXACT else 1
    return -(-size // step) * step
