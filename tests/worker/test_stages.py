"""What the last stage drew reaches the others' slots, unless the request has left."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from octavo.core.plan import StepResult
from octavo.types import SamplingParams
from octavo.worker.batch import BatchBuilder
from octavo.worker.runner import _first_plan
from octavo.worker.slots import Slots
from octavo.worker.stages import Stages


def first_stage() -> Stages:
    world: Any = SimpleNamespace(pipeline=SimpleNamespace(size=2), place=SimpleNamespace(stage=0))
    model: Any = SimpleNamespace(
        spec=SimpleNamespace(hidden_size=8),
        dtype=torch.float32,
        device="cpu",
        stage=SimpleNamespace(is_last=False),
    )
    return Stages(world, model)


def drew(step: int, token: int) -> StepResult:
    none = np.zeros(0, dtype=np.int32)
    return StepResult(step, np.array([[token]], np.int32), np.ones(1, np.int32), none)


def test_a_drawn_token_comes_late_but_not_to_another_request() -> None:
    slots, stages = Slots(2, 32, 16, 320), first_stage()
    builder = BatchBuilder(slots, 32, 2)
    for step in range(3):
        plan = replace(_first_plan(3, SamplingParams(), 16), step=step)
        if step:
            plan.freed_slots = np.zeros(1, dtype=np.int32)
        slots.apply(plan)
        stages.expect(plan, builder.build(plan), slots)
    stages.take_drawn([drew(0, 7)], slots)  # of a request that has left slot 0 since
    assert slots.length[0] == 3
    stages.take_drawn([drew(2, 9)], slots)  # step 1 has failed: it gives none
    assert slots.length[0] == 4 and slots.history_host[0, 3] == 9
