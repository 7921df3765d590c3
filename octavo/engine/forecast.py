"""When places become free: the wait of a request that finds all of them taken.

The lengths of outputs are learned from the latest ones. Those that ``max_tokens`` ended would have
been longer, so the share of outputs that are longer than t is estimated the way survival is from
patients who leave a study (Kaplan and Meier, "Nonparametric estimation from incomplete
observations", 1958). A running sequence is expected to need as many further tokens as outputs that
came this far needed on average, at most up to its ``max_tokens``; a token takes a step. The
forecast should hold in nearly all cases, not on average: hence the margin, and a share of a mean
output, by which short waits are late as often as long ones.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import deque
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

Float64 = NDArray[np.float64]

PRIOR_TOKENS = 256  # the length of outputs before any has ended
MOST_LENGTHS = 256  # of the latest outputs
STEP_SHARE = 0.05  # of a new step in the mean
STEPS_TO_BEGIN = 2  # from the end of one sequence to the step of the next
MARGIN = 1.25
SPREAD = 0.3  # of a mean output: how much later than expected a place may become free


class PlaceForecast:
    """Fed by the client of an engine, asked by it for requests that may have to wait."""

    def __init__(self) -> None:
        self._latest: deque[tuple[int, bool]] = deque([(PRIOR_TOKENS, True)])  # in order of time
        self._sorted: list[tuple[int, bool]] = list(self._latest)
        self.step_seconds = 0.0  # moving average; 0.0 before the first step

    def on_step(self, seconds: float) -> None:
        if not self.step_seconds:
            self.step_seconds = seconds
        self.step_seconds += STEP_SHARE * (seconds - self.step_seconds)

    def on_end(self, num_tokens: int, by_itself: bool) -> None:
        """A sequence ended: ``by_itself`` (EOS, a stop), or since it was cut at its max_tokens."""
        entry = (num_tokens, by_itself)
        self._latest.append(entry)
        insort(self._sorted, entry)
        if len(self._latest) > MOST_LENGTHS:
            del self._sorted[bisect_right(self._sorted, self._latest.popleft()) - 1]

    def waits(self, running: Iterable[tuple[int, int]]) -> PlaceWaits:
        """From the (output tokens, max_tokens) of each running sequence."""
        outputs = _Outputs(self._sorted)
        num_tokens, max_tokens = np.array(list(running), dtype=np.float64).reshape(-1, 2).T
        # Of a sequence that is yet to come, allowed as many tokens as one of these.
        whole = outputs.left(np.zeros_like(max_tokens), max_tokens)
        steps = np.sort(outputs.left(num_tokens, max_tokens))
        mean = float(whole.mean()) if len(whole) else 0.0
        free = self.step_seconds * (MARGIN * steps + SPREAD * mean + STEPS_TO_BEGIN)
        return PlaceWaits(free.tolist(), MARGIN * self.step_seconds * mean)


class _Outputs:
    """The lengths of outputs: ``S(t)``, the share of those longer than t, and what follows."""

    def __init__(self, ended: Sequence[tuple[int, bool]]) -> None:
        lengths, by_itself = np.array(ended, dtype=np.float64).reshape(-1, 2).T
        falls = by_itself.nonzero()[0]
        num_at_risk = len(lengths) - falls
        self._at: Float64 = np.append(0.0, lengths[falls])  # lengths at which S falls
        self._share: Float64 = np.append(1.0, np.cumprod(1 - 1 / num_at_risk))  # S from there on
        areas = self._share[:-1] * np.diff(self._at)
        self._area: Float64 = np.append(0.0, np.cumsum(areas))  # of S, from 0 to there

    def left(self, num_tokens: Float64, max_tokens: Float64) -> Float64:
        """Further tokens expected of sequences with ``num_tokens`` of at most ``max_tokens``."""
        share = self._share[self._place(num_tokens)]
        area = self._until(max_tokens) - self._until(num_tokens)
        # Longer than all recent outputs: as much again.
        expected = np.where(share > 0, area / np.maximum(share, 1e-300), np.maximum(num_tokens, 1))
        return np.minimum(expected, max_tokens - num_tokens)

    def _place(self, length: Float64) -> NDArray[np.intp]:
        after: NDArray[np.intp] = np.searchsorted(self._at, length, side="right")
        return after - 1

    def _until(self, length: Float64) -> Float64:
        """Area of S from 0 on: the mean length of outputs cut at ``length``."""
        place = self._place(length)
        return self._area[place] + self._share[place] * (length - self._at[place])


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
