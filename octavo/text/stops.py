"""The stop rules on text, for every path that makes text.

A stop string counts when its last character comes out, so the one that is complete first wins
(of several complete at the same character, the longest). Nothing here depends on how the text was
cut into tokens or chunks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StopMatch:
    stop: str
    end: int  # characters of the scanned piece up to and including the stop string's last


class StopScanner:
    """Finds stop strings in a text that comes in pieces (Knuth, Morris, Pratt 1977: one step per
    character, also for long or self-overlapping stop strings)."""

    __slots__ = ("_failures", "_matched", "_stops")

    def __init__(self, stops: Sequence[str]) -> None:
        """``stops``: not empty, and none of them empty."""
        self._stops = list(dict.fromkeys(stops))
        self._failures = [_failure_table(stop) for stop in self._stops]
        self._matched = [0] * len(self._stops)  # characters of each stop that the text ends with

    @property
    def num_held(self) -> int:
        """Characters at the end of the text that could begin a stop string."""
        return max(self._matched)

    def scan(self, piece: str, armed: bool = True) -> StopMatch | None:
        """Takes in ``piece``; returns the stop string it completes. Not ``armed``: complete ones
        are let pass, begun ones are still followed."""
        best: StopMatch | None = None
        for index, stop in enumerate(self._stops):
            if not self._matched[index] and stop[0] not in piece:
                continue
            end = self._follow(index, piece, armed)
            if end is not None and (
                best is None or (end, -len(stop)) < (best.end, -len(best.stop))
            ):
                best = StopMatch(stop, end)
        return best

    def _follow(self, index: int, piece: str, armed: bool) -> int | None:
        stop, failure, matched = self._stops[index], self._failures[index], self._matched[index]
        for position, char in enumerate(piece, 1):
            while matched and stop[matched] != char:
                matched = failure[matched - 1]
            if stop[matched] == char:
                matched += 1
                if matched == len(stop):
                    if armed:
                        return position
                    matched = failure[-1]
        self._matched[index] = matched
        return None


def _failure_table(stop: str) -> list[int]:
    """For each prefix: the length of its longest proper prefix that is also its suffix."""
    table = [0] * len(stop)
    length = 0
    for index in range(1, len(stop)):
        while length and stop[length] != stop[index]:
            length = table[length - 1]
        if stop[length] == stop[index]:
            length += 1
        table[index] = length
    return table
