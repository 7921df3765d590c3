"""How far a start has come, for those who ask meanwhile."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from octavo.engine.messages import Progress


@dataclass
class Loading:
    """``latest``: what was told last. ``began``: ``time.monotonic()`` of its latest phase."""

    latest: Progress = field(default_factory=lambda: Progress("starting the engine"))
    began: float = field(default_factory=time.monotonic)

    def take(self, progress: Progress) -> None:
        if progress.phase != self.latest.phase:
            self.began = time.monotonic()
        self.latest = progress

    def facts(self) -> dict[str, object]:
        """``fraction``: 0 to 1, of ``num_bytes`` where bytes are moved; null: not known."""
        known = self.latest.fraction >= 0
        return {
            "phase": self.latest.phase,
            "fraction": round(self.latest.fraction, 4) if known else None,
            "num_bytes": self.latest.num_bytes or None,
            "seconds": round(time.monotonic() - self.began, 1),
        }

    def __str__(self) -> str:
        known = f" {self.latest.fraction:.0%}" if self.latest.fraction >= 0 else ""
        return f"{self.latest.phase}{known}, {time.monotonic() - self.began:.0f} s"
