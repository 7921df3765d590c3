"""The start of several engines, told as one: how far the slowest has come."""

from __future__ import annotations

from collections.abc import Callable

from octavo.engine.messages import Progress


class JointProgress:
    """Engines go through the same phases in the same order, each at its own pace."""

    def __init__(self, count: int, show: Callable[[Progress], None]) -> None:
        self._show = show
        self._order: dict[str, int] = {}  # phase -> its place
        self._latest: list[Progress | None] = [None] * count

    def take(self, index: int, progress: Progress) -> None:
        """Engine ``index`` has come so far."""
        self._order.setdefault(progress.phase, len(self._order))
        self._latest[index] = progress
        known = [latest for latest in self._latest if latest is not None]
        if len(known) == len(self._latest):
            self._show(min(known, key=lambda p: (self._order[p.phase], p.fraction)))
