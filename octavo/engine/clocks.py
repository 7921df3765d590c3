"""How far another host's clock is from this one's, from the pings that pass between them."""

from __future__ import annotations

from collections import deque

KEPT_SAMPLES = 20


class ClockOffset:
    """``time.monotonic()`` of two hosts counts from different moments, and drifts apart slowly. Of
    the last pings the one that came back fastest says best when the other host answered (as in NTP,
    RFC 5905 §8): in the middle of its way, give or take half of it."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, float]] = deque(maxlen=KEPT_SAMPLES)
        self.seconds = 0.0  # to add to the other clock

    @property
    def known(self) -> bool:
        return bool(self._samples)

    def measure(self, sent: float, answered: float, now: float) -> None:
        """A ping left at ``sent`` and its answer came at ``now``, by this clock; it was answered at
        ``answered`` by the other."""
        self._samples.append((now - sent, (sent + now) / 2 - answered))
        self.seconds = min(self._samples)[1]
