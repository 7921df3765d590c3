"""suffix: n-grams, also of what this server answered lately.

Answers resemble each other where prompts do (agents, extraction, code edits): what followed the
last tokens in an earlier answer is guessed where it matched more of them than the request itself.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from octavo.core.plan import StepPlan
from octavo.worker.slots import Slots
from octavo.worker.speculative.ngram import NgramProposer, continuation

Int32 = NDArray[np.int32]
BREAK = -1  # between two outputs: no id
KEPT = 1 << 16  # ids of recent outputs
SHORTEST_OUTPUT = 8  # shorter ones say nothing
SHORTEST_MATCH = 3  # what others wrote says less than the request's own text


class RecentOutputs:
    """The latest outputs, one behind the other in one array; the oldest are dropped."""

    def __init__(self, kept: int = KEPT) -> None:
        self._ids = np.full(2 * kept, BREAK, dtype=np.int32)
        self._kept, self._end = kept, 0

    def add(self, output: Int32) -> None:
        """output: ids of an answer that has ended; of very long ones the end is kept."""
        output = output[-(self._kept - 1) :]
        if self._end + len(output) + 1 > len(self._ids):
            tail = self._ids[self._end - self._kept : self._end].copy()
            self._ids[: self._kept] = tail
            self._end = self._kept
        self._ids[self._end : self._end + len(output)] = output
        self._end += len(output)
        self._ids[self._end] = BREAK
        self._end += 1

    @property
    def ids(self) -> Int32:
        """At most 2 x ``kept`` ids, outputs separated by BREAK."""
        return self._ids[: self._end]


class SuffixProposer(NgramProposer):
    def __init__(self, slots: Slots, shortest: int, longest: int) -> None:
        super().__init__(slots, shortest, longest)
        self._recent = RecentOutputs()

    def apply(self, plan: StepPlan) -> None:
        for slot in plan.freed_slots.tolist():
            start, end = self._slots.prompt_len[slot], self._slots.length[slot]
            if end - start >= SHORTEST_OUTPUT:
                self._recent.add(self._slots.history_host[slot, start:end])

    def continued(self, slot: int, most: int) -> tuple[Int32, int]:
        own, matched = super().continued(slot, most)
        if matched >= self._longest:
            return own, matched
        known = self._slots.history_host[slot, : self._slots.length[slot]]
        shortest = max(SHORTEST_MATCH, self._shortest, matched + 1)
        theirs, elsewhere = continuation(self._recent.ids, known, shortest, self._longest, most)
        ends = np.flatnonzero(theirs == BREAK)
        theirs = theirs[: min(elsewhere, int(ends[0]) if len(ends) else most)]
        # An answer that ended here says nothing, however much of it was matched.
        return (theirs, elsewhere) if len(theirs) else (own, matched)
