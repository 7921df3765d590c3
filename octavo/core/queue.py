"""The order of requests: of the waiting queue, and of who keeps running when blocks run out."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator

from octavo.core.request import Request

# Smaller is served first. The key of a request never changes, so neither does the order of two.
OrderKey = Callable[[Request], tuple[float, int]]


def fcfs_key(request: Request) -> tuple[float, int]:
    """First come, first served. A preempted request is older than all that wait: it goes first."""
    return (0.0, request.sequence)


def priority_key(ageing: float) -> OrderKey:
    """Lower priority value first, then arrival.

    With ``ageing`` seconds per level the value falls while waiting. All wait at the same pace, so
    the order of two requests is that of priority + arrival / ageing: fixed on arrival.
    """

    def key(request: Request) -> tuple[float, int]:
        aged = request.arrival / ageing if ageing > 0 else 0.0
        return (request.priority + aged, request.sequence)

    return key


def order_key(policy: str, ageing: float = 0.0) -> OrderKey:
    """The key of ``--scheduling-policy``. KeyError for an unknown one (the parser knows them)."""
    return {"fcfs": fcfs_key, "priority": priority_key(ageing)}[policy]


class WaitingQueue:
    """Waiting requests in the order of a key."""

    def __init__(self, key: OrderKey) -> None:
        self._key = key
        self._entries: list[tuple[tuple[float, int], Request]] = []

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Request]:
        """In order, over a snapshot: callers remove what they admit."""
        return iter([request for _, request in self._entries])

    def push(self, request: Request) -> None:
        insort(self._entries, (self._key(request), request), key=lambda entry: entry[0])

    def remove(self, request: Request) -> None:
        """ValueError if it does not wait."""
        index = bisect_left(self._entries, self._key(request), key=lambda entry: entry[0])
        if index == len(self._entries) or self._entries[index][1] is not request:
            raise ValueError(f"{request} does not wait")
        del self._entries[index]
