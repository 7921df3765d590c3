"""What passes between the stages of a pipeline: hidden states forward, drawn tokens back.

A step's hidden states go from each stage to the next, each rank to the one of its number. What the
last stage draws reaches the others through the host, with a later plan: the scheduler has a row
that draws in one plan in flight at most, so its token is always there before the row is.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.core.plan import StepPlan, StepResult
from octavo.model.decoder import Model
from octavo.parallel import World
from octavo.worker.batch import StepBatch
from octavo.worker.slots import Slots


@dataclass(frozen=True)
class Expected:
    """What a step will have drawn. ``epochs``: of its slots: a token comes too late for a request
    that has left."""

    step: int
    rows: NDArray[np.int64]  # of the plan
    slots: NDArray[np.int32]
    positions: NDArray[np.int32]
    epochs: NDArray[np.int64]


class Stages:
    """Seen from one rank."""

    def __init__(self, world: World, model: Model) -> None:
        self._comm = world.pipeline
        self._index = world.place.stage
        self._hidden_size, self._dtype = model.spec.hidden_size, model.dtype
        self._device = torch.device(model.device)
        self.is_last = model.stage.is_last
        self.waited = 0.0  # seconds for the stage before, ever
        self._under_way: deque[Callable[[], None]] = deque()
        self._expected: deque[Expected] = deque()

    def receive(self, num_tokens: int) -> Tensor | None:
        """Hidden states [T, hidden] of the stage before; None for the first."""
        if self._index == 0:
            return None
        x = torch.empty(num_tokens, self._hidden_size, dtype=self._dtype, device=self._device)
        began = time.perf_counter()
        self._comm.receive(x, self._index - 1)
        self.waited += time.perf_counter() - began
        return x

    def send(self, hidden: Tensor) -> None:
        """To the next stage, which may still be at work on steps before: waits while it has as many
        to come as there are stages."""
        self._under_way.append(self._comm.send(hidden.contiguous(), self._index + 1))
        while len(self._under_way) > self._comm.size:
            self._under_way.popleft()()

    def expect(self, plan: StepPlan, batch: StepBatch, slots: Slots) -> None:
        """The rows of ``batch`` that draw will get their tokens by ``take_drawn``."""
        drawing = batch.slots[batch.drawing]
        self._expected.append(
            Expected(
                plan.step,
                batch.plan_rows[batch.drawing],
                drawing,
                batch.draw_positions,
                slots.epoch[drawing],
            )
        )

    def take_drawn(self, results: Sequence[StepResult], slots: Slots) -> None:
        """Results of the last stage, in order. Steps that have failed give none."""
        for result in results:
            while self._expected and self._expected[0].step < result.step:
                self._expected.popleft()
            if not self._expected or self._expected[0].step != result.step:
                continue
            drawn = self._expected.popleft()
            stayed = slots.epoch[drawn.slots] == drawn.epochs
            rows, own, positions = drawn.rows[stayed], drawn.slots[stayed], drawn.positions[stayed]
            runs = result.tokens[rows].astype(np.int64)
            if runs.shape[1] > 1:
                slots.append_runs(own, positions, result.num_accepted[rows], runs)
            else:
                slots.append(own, positions, torch.from_numpy(runs[:, 0]))

    def settle(self) -> None:
        """Waits until all has gone, and forgets what was expected."""
        while self._under_way:
            self._under_way.popleft()()
        self._expected.clear()
