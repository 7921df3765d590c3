"""Drives an LLM's engine step by step and notes when each token came and what each step held."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from benchmarks.cpu_workload import Work
from octavo import LLM, SamplingParams
from octavo.engine.admission import prepare
from octavo.engine.messages import EngineStats


@dataclass
class Track:
    """One request: when it arrived and when its tokens came."""

    arrival: float
    times: list[float] = field(default_factory=list)
    finished: bool = False

    @property
    def first_token_seconds(self) -> float:
        return self.times[0] - self.arrival

    @property
    def longest_gap(self) -> float:
        return max(b - a for a, b in zip(self.times, self.times[1:], strict=False))


class Driver:
    def __init__(self, llm: LLM) -> None:
        self.llm = llm
        self.stats: list[EngineStats] = []  # after each step
        self._tracks: dict[int, Track] = {}
        self._next_handle = 1 << 40  # apart from the LLM's own

    def add(self, work: Work, n: int = 1) -> Track:
        """Choice 0 of a greedy request that says exactly ``max_tokens`` tokens."""
        params = SamplingParams(temperature=0, max_tokens=work.max_tokens, ignore_eos=True, n=n)
        handle, self._next_handle = self._next_handle, self._next_handle + n
        track = Track(time.monotonic())
        request = prepare(
            self.llm.info,
            params,
            work.prompt,
            handle=handle,
            request_id=str(handle),
            arrival=track.arrival,
        )
        self._tracks[handle] = track
        self.llm.engine.add(request)
        return track

    def step(self) -> None:
        outputs = self.llm.engine.step()
        if outputs is None:
            return
        now = time.monotonic()
        self.stats.append(outputs.stats)
        for handle, _ in outputs.pairs():
            if track := self._tracks.get(handle):
                track.times.append(now)
        for event in outputs.finished:
            if track := self._tracks.get(event.handle):
                track.finished = True

    def run(self, until: Callable[[], bool] | None = None) -> None:
        """Steps until ``until()``, or until nothing is left to do."""
        while self.llm.engine.has_work and not (until and until()):
            self.step()
