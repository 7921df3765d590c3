"""Whether an engine makes progress, judged by its client from what it hears."""

from __future__ import annotations

from octavo.engine.messages import Heartbeat
from octavo.engine.watchdog import LATE_SHARE

HEARTBEAT_LIMIT = 1.5  # seconds; the engine beats every 0.5 s


class Health:
    """``late``: why nothing new is taken, though what is open may go on; ``stalled``: why streams
    cannot go on now, until heartbeats return; ``death``: why none will any more; "" where there is
    no reason. Times are ``time.monotonic()`` seconds."""

    def __init__(self, step_deadline: float) -> None:
        self._deadline = step_deadline
        self._last_beat = 0.0
        self.step_age = 0.0
        self._problem = ""
        self.late = ""
        self.stalled = ""
        self.death = ""

    def begin(self, now: float) -> None:
        """The engine has loaded: from now on it has to be heard."""
        self._last_beat = now

    def hear(self, beat: Heartbeat, now: float) -> None:
        """A beat has come. When it was sent says nothing where the engine's host has a clock of
        its own."""
        self._last_beat = now
        self.step_age, self._problem = beat.step_age, beat.problem

    def judge(self, now: float) -> str:
        """Updates ``late`` and ``stalled``. Returns why the engine must be ended, or ""."""
        silence = now - self._last_beat
        self.late = ""
        if self.step_age > self._deadline * LATE_SHARE:
            self.late = f"a step has taken {self.step_age:.1f} s; its stacks are in the log"
        if silence > max(self._deadline, HEARTBEAT_LIMIT):
            return f"the engine has not answered for {silence:.1f} s (--step-deadline)"
        if silence > HEARTBEAT_LIMIT:
            self.stalled = f"the engine has not answered for {silence:.1f} s"
        elif self.step_age > self._deadline:
            return (
                f"a step has taken {self.step_age:.1f} s, above --step-deadline "
                f"{self._deadline:g} s"
            )
        else:
            self.stalled = self._problem
        return ""
