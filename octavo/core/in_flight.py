"""Plans in flight, and how a result finds its requests although slots have changed hands since."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from octavo.core.plan import StepPlan, StepResult
from octavo.core.request import Request
from octavo.core.running import Index


@dataclass(slots=True)
class Issued:
    """A plan in flight. Its rows belong to whoever held their slots when it was issued: the same
    epoch now means the same request."""

    plan: StepPlan
    slots: Index  # [n] the plan's
    epochs: NDArray[np.int64]  # [n]
    orphans: dict[int, Request] = field(default_factory=dict)  # row -> preempted since


class InFlight:
    """The issued plans, oldest first. Results come in the same order."""

    def __init__(self) -> None:
        self._plans: deque[Issued] = deque()

    def __len__(self) -> int:
        return len(self._plans)

    def __iter__(self) -> Iterator[Issued]:
        return iter(self._plans)

    def push(self, plan: StepPlan, slots: Index, epochs: NDArray[np.int64]) -> None:
        self._plans.append(Issued(plan, slots, epochs))

    def pop(self) -> Issued:
        return self._plans.popleft()

    def match(self, result: StepResult) -> Issued:
        """The plan of the next result. RuntimeError if it is another step's."""
        issued = self._plans.popleft()
        if result.step != issued.plan.step:
            raise RuntimeError(
                f"got the result of step {result.step}, step {issued.plan.step} is due"
            )
        return issued

    def orphan(self, request: Request, slot: int, epoch: int) -> None:
        """A request loses its slot: its rows in flight stay its own."""
        for issued in self._plans:
            for row in np.nonzero(issued.slots == slot)[0].tolist():
                if issued.epochs[row] == epoch:
                    issued.orphans[row] = request
                    request.in_flight += 1
