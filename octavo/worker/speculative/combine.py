"""Which proposer is asked for; and two as one."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from octavo.core.plan import StepPlan
from octavo.speculation import Speculating
from octavo.worker.batch import StepBatch
from octavo.worker.slots import Slots
from octavo.worker.speculative.ngram import NgramProposer
from octavo.worker.speculative.proposer import Proposer
from octavo.worker.speculative.suffix import SuffixProposer

Int32 = NDArray[np.int32]


class FirstOf:
    """The guesses of ``first``, and where it has none those of ``second``."""

    def __init__(self, first: Proposer, second: Proposer) -> None:
        self._first, self._second = first, second

    def apply(self, plan: StepPlan) -> None:
        self._first.apply(plan)
        self._second.apply(plan)

    def computed(self, batch: StepBatch, hidden: Tensor) -> None:
        self._first.computed(batch, hidden)
        self._second.computed(batch, hidden)

    def propose(self, slots: Int32, most: Int32) -> tuple[Int32, Int32]:
        counts, ids = self._first.propose(slots, most)
        rows = (counts == 0).nonzero()[0]
        if len(rows):
            more, found = self._second.propose(slots[rows], most[rows])
            counts[rows] = more
            ids[rows, : found.shape[1]] = found
        return counts, ids


def make_proposer(wanted: Speculating, slots: Slots, drafts: Proposer | None) -> Proposer:
    """``drafts``: computes guesses, for the methods that do."""
    by_text: Proposer | None = None
    if "suffix" in wanted.methods:
        by_text = SuffixProposer(slots, wanted.shortest, wanted.longest)
    elif "ngram" in wanted.methods:
        by_text = NgramProposer(slots, wanted.shortest, wanted.longest)
    if by_text is None or drafts is None:
        found = by_text or drafts
        assert found is not None, "a method that computes guesses needs something that does"
        return found
    return FirstOf(by_text, drafts)
