"""Proposer: where guesses come from. Any guess is safe, since only right ones are kept.

A proposer sees the slots as they are before a step: all tokens drawn so far are in the histories.
Every rank of an engine makes the same guesses by itself, so a proposer may depend on the slots and
on plans alone. One that needs the target's hidden states (EAGLE-3, MTP heads) gets them by
``computed``.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from octavo.core.plan import StepPlan
from octavo.worker.batch import StepBatch

Int32 = NDArray[np.int32]


class Proposer(Protocol):
    def apply(self, plan: StepPlan) -> None:
        """Before the slots take over a plan's changes: which requests leave, which come."""

    def propose(self, slots: Int32, most: Int32) -> tuple[Int32, Int32]:
        """Up to ``most[i]`` guesses for each of ``slots``, both int32 [r]. Returns how many there
        are, int32 [r], and the ids, int32 [r, k]; of a row, the first are guessed."""

    def computed(self, batch: StepBatch, hidden: Tensor) -> None:
        """The target has computed a step. hidden: [r, hidden] of the rows that draw, before they
        do."""


class Silent:
    """What most proposers do with plans and hidden states: nothing."""

    def apply(self, plan: StepPlan) -> None:
        pass

    def computed(self, batch: StepBatch, hidden: Tensor) -> None:
        pass
