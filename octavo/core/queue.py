"""The order of requests: of the waiting queue, and of who keeps running when blocks run out.

Here the orders that a request's own facts decide; ``fair`` shares between tenants.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Protocol

from octavo.core.request import Request

if TYPE_CHECKING:
    from octavo.core.running import Running

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


class Queue(Protocol):
    """What the scheduler needs of a waiting queue."""

    key: OrderKey  # of running requests: who comes first when the budget of a step is short

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Request]:
        """All that wait, in no particular order."""

    def push(self, request: Request) -> None:
        """A request arrives, or comes back preempted."""

    def remove(self, request: Request) -> None:
        """It waits no longer. ValueError if it did not wait."""

    def in_turn(self) -> Iterator[Request]:
        """Who is to be admitted next, again and again: for each the caller removes it and calls
        ``admitted``, or passes it over, or stops."""

    def admitted(self, request: Request, num_tokens: int) -> None:
        """A removed request got a slot; ``num_tokens`` of its tokens are to be computed."""

    def left(self, request: Request) -> None:
        """It lost its slot: ended, or preempted. ``request.tokens`` are all it has."""

    def watch(self, running: Running) -> None:
        """Told once which requests run."""

    def last_in_line(self, running: Running) -> int:
        """The slot of who is preempted first, of at least one that runs."""


class WaitingQueue:
    """Waiting requests in the order of a key."""

    def __init__(self, key: OrderKey = fcfs_key) -> None:
        self.key = key
        self._entries: list[tuple[tuple[float, int], Request]] = []

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Request]:
        """In order, over a snapshot."""
        return iter([request for _, request in self._entries])

    def push(self, request: Request) -> None:
        insort(self._entries, (self.key(request), request), key=lambda entry: entry[0])

    def remove(self, request: Request) -> None:
        index = bisect_left(self._entries, self.key(request), key=lambda entry: entry[0])
        if index == len(self._entries) or self._entries[index][1] is not request:
            raise ValueError(f"{request} does not wait")
        del self._entries[index]

    def in_turn(self) -> Iterator[Request]:
        index = 0
        while index < len(self._entries):
            request = self._entries[index][1]
            yield request
            passed_over = index < len(self._entries) and self._entries[index][1] is request
            index += passed_over

    def at(self, index: int) -> Request:
        """The ``index``-th in line."""
        return self._entries[index][1]

    def admitted(self, request: Request, num_tokens: int) -> None:
        pass

    def left(self, request: Request) -> None:
        pass

    def watch(self, running: Running) -> None:
        pass

    def last_in_line(self, running: Running) -> int:
        return int(running.order[-1])
