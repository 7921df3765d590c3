"""What happens in the scheduler, as it happens: for statistics, explanations, the live page."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum


class EventKind(Enum):
    ADMITTED = "admitted"  # got a slot; detail: tokens found in the prefix cache
    COPIED = "copied"  # a shared block was copied for a writer; detail: tokens kept
    PREEMPTED = "preempted"  # lost its slot and blocks; detail: tokens known
    FINISHED = "finished"  # detail: tokens known


@dataclass(slots=True, frozen=True)
class Event:
    kind: EventKind
    time: float  # of the scheduler's clock
    step: int
    handle: int
    detail: int


EventSink = Callable[[Event], None]


def ignore(event: Event) -> None:
    """The sink of nobody who listens."""


@dataclass(slots=True)
class Counters:
    """Running totals of one scheduler."""

    prefix_queries: int = 0  # tokens looked up
    prefix_hits: int = 0  # tokens found
    preemptions: int = 0
    copies: int = 0
    prompt_tokens: int = 0  # of requests admitted for the first time
    prompt_tokens_cached: int = 0
    generation_tokens: int = 0
    steps: int = 0
