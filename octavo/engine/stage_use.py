"""StageUse: how much of the time in which an engine has work the stages of its pipeline compute.

A stage that waits for another one, or for a plan, is a bubble. Of a stretch of time the bubble
fraction is 1 - busy seconds of a stage, the mean over all, / seconds in which a plan was in flight.
"""

from __future__ import annotations

import math

import numpy as np

from octavo.core.plan import Float32

# The fraction is of about so many of the latest seconds with work.
WINDOW = 10.0


class StageUse:
    """``busy_seconds`` [stages] and ``work_seconds`` grow for ever: their increases give the
    fraction of any stretch of time."""

    def __init__(self, num_stages: int) -> None:
        self.busy_seconds = np.zeros(num_stages)
        self.work_seconds = 0.0
        self._since: float | None = None  # no plan is in flight
        self._recent_busy = self._recent_work = 0.0

    def begin(self, now: float) -> None:
        """A plan was submitted."""
        if self._since is None:
            self._since = now

    def observe(self, now: float, busy: Float32 | None) -> None:
        """The oldest plan in flight has come back. ``busy``: seconds that each stage computed it;
        None: nobody measured, so the time since the last one does not count either."""
        since, self._since = self._since, now
        if busy is None or since is None:
            return
        elapsed = now - since
        self.busy_seconds += busy
        self.work_seconds += elapsed
        fade = math.exp(-elapsed / WINDOW)
        self._recent_busy = self._recent_busy * fade + float(busy.mean())
        self._recent_work = self._recent_work * fade + elapsed

    def end(self) -> None:
        """No plan is left in flight, and none followed."""
        self._since = None

    @property
    def bubble(self) -> float:
        """Of late; 0.0 before anything was measured."""
        if not self._recent_work:
            return 0.0
        return min(1.0, max(0.0, 1.0 - self._recent_busy / self._recent_work))
