"""Requests whose answer is their prompt's vector: rows, flags, preemption, ends."""

from __future__ import annotations

import numpy as np
import pytest

from octavo.core.plan import POOL, SAMPLE, StepPlan, StepResult, decode, encode
from octavo.types import FinishReason, Pooling
from tests.core.harness import Harness
from tests.core.test_plan import assert_equal


def finish(h: Harness, plan: StepPlan):
    """Executes a plan: rows with POOL at their prompt's end give a vector of their slot."""
    draws = (plan.flags & SAMPLE).astype(np.int32)
    pooled = {}
    for row, slot in enumerate(plan.slots.tolist()):
        request = h.scheduler.running.requests[slot]
        ends = request is not None and plan.starts[row] + plan.num_tokens[row] >= request.prompt_len
        if plan.flags[row] & POOL and ends:
            pooled[row] = np.full(3, slot, dtype=np.float32)
    tokens = np.full((plan.num_rows, 1), 100, dtype=np.int32) * draws[:, None]
    result = StepResult(plan.step, tokens, draws, np.zeros(0, dtype=np.int32), pooled=pooled)
    update = h.scheduler.update(result)
    h.scheduler.check()
    return update


@pytest.mark.parametrize(
    ("pooling", "flags"), [(Pooling.LAST, [0, 0, POOL]), (Pooling.MEAN, [POOL] * 3)]
)
def test_every_token_is_computed_and_none_drawn(pooling: Pooling, flags: list[int]) -> None:
    h = Harness(max_num_batched_tokens=8, max_in_flight=1)
    request = h.add(range(10, 30), max_tokens=0, pooling=pooling)
    seen, handles = [], []
    while (plan := h.schedule()) is not None:
        seen.append((int(plan.starts[0]), int(plan.num_tokens[0]), int(plan.flags[0])))
        update = finish(h, plan)
        handles += update.pooled_handles.values()
        assert not len(update.tokens)
    assert seen == [(0, 8, flags[0]), (8, 8, flags[1]), (16, 4, flags[2])]
    assert handles == [request.handle] and request.finish_reason is FinishReason.LENGTH
    assert h.pool.num_held == 0


def test_plans_in_flight_end_with_the_one_of_the_last_token() -> None:
    h = Harness(max_num_batched_tokens=8)
    request = h.add(range(10, 26), max_tokens=0, pooling=Pooling.MEAN)
    first, second = h.schedule(), h.schedule()
    assert h.schedule() is None
    assert not finish(h, first).finished
    update = finish(h, second)
    assert update.finished == [request] and update.pooled_handles == {0: request.handle}


def test_a_single_token_is_a_row_of_its_own() -> None:
    h = Harness()
    request = h.add([7], max_tokens=0, pooling=Pooling.LAST)
    plan = h.schedule()
    assert plan.num_tokens.tolist() == [1] and plan.flags.tolist() == [POOL]
    assert finish(h, plan).finished == [request]


def test_the_mean_reads_no_cache_and_leaves_its_blocks_to_others() -> None:
    h = Harness(max_in_flight=1)
    for pooling, computed in ((Pooling.MEAN, 12), (Pooling.MEAN, 12), (Pooling.LAST, 1)):
        h.add(range(10, 22), max_tokens=0, pooling=pooling)
        plan = h.schedule()
        assert plan.num_tokens.tolist() == [computed]
        finish(h, plan)


def test_a_preempted_one_starts_anew_and_is_told_once() -> None:
    """Its vector is on its way when a longer-standing answer takes its blocks."""
    h = Harness(num_blocks=7, max_num_batched_tokens=4, max_in_flight=2)
    h.add(range(50, 59), max_tokens=11)
    pooled = h.add(range(10, 24), max_tokens=0, pooling=Pooling.MEAN)
    told, plans = [], []
    for _ in range(60):
        while (plan := h.schedule()) is not None:
            plans.append(plan)
        if not plans:
            break
        told += finish(h, plans.pop(0)).pooled_handles.values()
    assert pooled.num_preemptions > 0
    assert told == [pooled.handle] and pooled.finish_reason is FinishReason.LENGTH


def test_vectors_survive_encoding() -> None:
    h = Harness()
    h.add([5, 6, 7], max_tokens=0, pooling=Pooling.MEAN)
    plan = h.schedule()
    assert_equal(plan, decode(encode(plan), StepPlan))
    none = np.zeros(0, dtype=np.int32)
    vector = np.arange(4, dtype=np.float32)
    result = StepResult(0, np.zeros((1, 1), np.int32), np.zeros(1, np.int32), none)
    result.pooled[0] = vector
    found = decode(encode(result), StepResult).pooled
    assert list(found) == [0] and found[0].dtype == np.float32
    np.testing.assert_array_equal(found[0], vector)
