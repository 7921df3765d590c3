"""When places become free: the wait of a request that finds all of them taken.

How long outputs are is learned from the latest ones. Those that ``max_tokens`` ended would have
been longer, so the share of outputs that are longer than t is estimated as survival is from
patients who leave a study (Kaplan and Meier, "Nonparametric estimation from incomplete
observations", 1958). A running sequence is expected to need the mean of what is left to those that
came as far, at most its ``max_tokens``; a token takes a step. The forecast is to be kept in nearly
all cases, not on average: hence the margin. Where outputs vary much it errs on the late side by
itself, as the first of several to end is earlier than each alone is expected to.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import deque
from collections.abc import Iterable, Sequence

PRIOR_TOKENS = 256  # the length of outputs before any has ended
MOST_LENGTHS = 256  # of the latest outputs
STEP_SHARE = 0.05  # of a new step in the mean
STEPS_TO_BEGIN = 2  # from the end of one sequence to the step of the next
MARGIN = 1.25


class PlaceForecast:
    """Fed by the client of an engine, asked by it for requests that may have to wait."""

    def __init__(self) -> None:
        self._latest: deque[tuple[int, bool]] = deque([(PRIOR_TOKENS, True)])  # in order of time
        self._sorted: list[tuple[int, bool]] = list(self._latest)
        self.step_seconds = 0.0  # mean of late; 0.0 before the first

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
        sequences = list(running)
        steps = sorted(outputs.left(*sequence) for sequence in sequences)
        # Of a sequence that is yet to come, allowed as many tokens as these.
        whole = [outputs.left(0, max_tokens) for _, max_tokens in sequences]
        mean = sum(whole) / len(whole) if whole else 0.0
        step = self.step_seconds
        free = [step * (MARGIN * count + STEPS_TO_BEGIN) for count in steps]
        return PlaceWaits(free, MARGIN * step * mean)


class _Outputs:
    """The lengths of outputs: ``S(t)``, the share of those longer than t, and what follows."""

    def __init__(self, ended: Sequence[tuple[int, bool]]) -> None:
        self._at = [0]  # lengths at which S falls
        self._share = [1.0]  # S from there on
        self._area = [0.0]  # of S, from 0 to there
        for index, (length, by_itself) in enumerate(ended):
            if not by_itself:
                continue
            num_at_risk = len(ended) - index
            self._area.append(self._area[-1] + self._share[-1] * (length - self._at[-1]))
            self._share.append(self._share[-1] * (1 - 1 / num_at_risk))
            self._at.append(length)

    def left(self, num_tokens: int, max_tokens: int) -> float:
        """Further tokens of a sequence that has so many and may have no more than max_tokens."""
        share = self._share[bisect_right(self._at, num_tokens) - 1]
        most = max_tokens - num_tokens
        if share <= 0.0:  # longer than all of late: as much again
            return min(max(num_tokens, 1), most)
        return min((self._until(max_tokens) - self._until(num_tokens)) / share, most)

    def _until(self, length: int) -> float:
        """Area of S from 0 on: the mean length of outputs cut at ``length``."""
        index = bisect_right(self._at, length) - 1
        return self._area[index] + self._share[index] * (length - self._at[index])


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
