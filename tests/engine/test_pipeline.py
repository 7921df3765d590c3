"""An engine whose executor has several stages: as many plans in flight, what steps cost, bubbles.
Time is virtual: a stage computes a plan when the one before it has, and it is free."""

from __future__ import annotations

from collections import deque

import numpy as np
import pytest

from octavo.config import EngineConfig
from octavo.core.plan import SAMPLE, StepPlan, StepResult
from octavo.engine.engine import Engine
from octavo.engine.stage_use import StageUse
from octavo.flags import from_flags
from octavo.types import FinishReason
from tests.engine.test_engine import finishes, run, tokens_of
from tests.engine.toy import ToyExecutor, add_request, continuation, toy_info


class PipelineExecutor(ToyExecutor):
    """``seconds``: of each stage for a plan, and ``per_token`` for each of its tokens."""

    def __init__(self, *seconds: float, per_token: float = 0.0, measures: bool = True) -> None:
        super().__init__(len(seconds))
        self.now = 0.0
        self.most_in_flight = 0
        self._seconds, self._per_token, self._measures = seconds, per_token, measures
        self._free = [0.0] * len(seconds)
        self._ends: deque[tuple[float, np.ndarray, set[int]]] = deque()

    def submit(self, plan: StepPlan) -> None:
        waiting = set().union(*(slots for _, _, slots in self._ends))
        waiting -= {new.slot for new in plan.new_requests}
        assert not waiting & set(plan.slots.tolist()), "a row whose token is not drawn yet"
        super().submit(plan)
        taken = np.array(self._seconds) + self._per_token * plan.total_tokens
        ready = self.now
        for stage, seconds in enumerate(taken):
            ready = self._free[stage] = max(ready, self._free[stage]) + seconds
        drawing = set(plan.slots[(plan.flags & SAMPLE).astype(bool)].tolist())
        self._ends.append((ready, taken.astype(np.float32), drawing))
        self.most_in_flight = max(self.most_in_flight, len(self._ends))

    def collect(self) -> StepResult:
        ended, taken, _ = self._ends.popleft()
        self.now = max(self.now, ended)
        result = super().collect()
        if self._measures:
            result.busy_seconds = taken
        return result


def start(executor: PipelineExecutor, **info) -> Engine:
    config = from_flags(EngineConfig, {})
    facts = {"num_blocks": 512, "max_num_batched_tokens": 512, **info}
    return Engine(config, toy_info(**facts), executor, clock=lambda: executor.now)


@pytest.mark.parametrize("stages", (2, 3, 4))
def test_as_many_plans_as_stages_give_what_each_request_would_get_alone(stages):
    executor = PipelineExecutor(*[1.0] * stages)
    engine = start(executor, num_blocks=24)
    prompts = [list(range(20 + i, 25 + 2 * i)) for i in range(8)]
    for handle, prompt in enumerate(prompts):
        engine.add(add_request(handle, prompt, 10))
    told = run(engine)
    for handle, prompt in enumerate(prompts):
        assert tokens_of(told, handle) == continuation(prompt, 10)
    assert executor.most_in_flight == stages and engine.stats().blocks_used == 0


def test_a_failed_step_ends_all_in_flight_and_the_pipeline_goes_on():
    executor = PipelineExecutor(1.0, 1.0)
    engine = start(executor)
    for handle in range(4):
        engine.add(add_request(handle, [5, handle], 40))
    for _ in range(3):
        engine.step()
    executor.fail_next = True
    told = run(engine)
    assert {end.reason for end in finishes(told).values()} == {FinishReason.ERROR}
    engine.add(add_request(9, [5, 6], 6))
    assert tokens_of(run(engine), 9) == continuation([5, 6], 6)


def test_the_bubble_is_the_share_of_time_in_which_stages_wait():
    """Of equal stages none waits while every one has a group; one row keeps one of two busy; a
    stage of half the time waits for the other half."""
    for seconds, rows, bubble in (
        ((1.0, 1.0), 8, 0.0),
        ((1.0, 1.0), 1, 0.5),
        ((1.0, 0.5), 8, 0.25),
        ((1.0, 1.0, 1.0, 1.0), 3, 0.25),
    ):
        executor = PipelineExecutor(*seconds)
        engine = start(executor)
        for handle in range(rows):
            engine.add(add_request(handle, [5, handle], 60))
        for _ in range(40):
            engine.step()
        stats = engine.stats()
        assert stats.bubble == pytest.approx(bubble, abs=0.02)
        before = stats.stage_busy_seconds, stats.work_seconds
        for _ in range(12):
            engine.step()
        stats = engine.stats()
        worked = stats.work_seconds - before[1]
        shares = [(a - b) / worked for a, b in zip(stats.stage_busy_seconds, before[0])]
        assert 1 - np.mean(shares) == pytest.approx(bubble, abs=0.03)


def test_an_idle_pipeline_has_no_bubble():
    executor = PipelineExecutor(1.0, 1.0)
    engine = start(executor)
    for handle in range(2):
        executor.now += 100.0
        engine.add(add_request(handle, [5, 6], 1))
        run(engine)
    assert engine.stats().work_seconds == pytest.approx(4.0)
    assert engine.stats().bubble == pytest.approx(0.5)


@pytest.mark.parametrize("measures", (True, False))
@pytest.mark.parametrize("rows", (1, 8))
def test_a_step_costs_what_its_longest_stage_takes(measures, rows):
    """Full or not; a token takes the time through all stages."""
    executor = PipelineExecutor(1.0, 1.0, measures=measures)
    engine = start(executor)
    for handle in range(rows):
        engine.add(add_request(handle, [5, handle], 60))
    for _ in range(60):
        engine.step()
    assert engine.costs.decode_seconds(-(-rows // 2)) == pytest.approx(1.0, rel=0.01)
    assert engine.stats().step_seconds == pytest.approx(2.0, rel=0.01)
    assert engine.stats().bubble == (0.0 if not measures else pytest.approx(0.25, abs=0.27))


def test_chunks_beside_decoding_rows_double_the_time_of_a_stage():
    executor = PipelineExecutor(0.010, 0.010, per_token=0.0001)
    limits = {"max_model_len": 4096, "max_num_batched_tokens": 2048, "num_blocks": 4096}
    engine = start(executor, max_num_seqs=9, **limits)
    for handle in range(8):
        engine.add(add_request(handle, [5, handle], 1000))
    for _ in range(40):
        engine.step()
    engine.add(add_request(10, list(range(10, 900)) * 4, 4))
    for _ in range(40):
        engine.step()
    # 10 ms and four tokens of 0.1 ms: 0.8 of that are 83 tokens, in steps of 64.
    assert engine.costs.decode_seconds(4) == pytest.approx(0.0104, rel=0.01)
    assert engine.costs.chunk_limit(4, 1) in (64, 80)


def test_stage_use_forgets_and_does_not_count_what_was_not_measured():
    use = StageUse(2)
    busy = np.array([1.0, 0.5], np.float32)
    assert use.bubble == 0.0
    use.begin(0.0)
    use.observe(1.0, busy)
    use.observe(5.0, None)
    use.observe(6.0, busy)
    use.end()
    assert use.work_seconds == 2.0 and use.busy_seconds.tolist() == [2.0, 1.0]
    assert use.bubble == pytest.approx(0.25)
    use.begin(100.0)
    for second in range(101, 200):
        use.observe(float(second), 2 * busy / 3)
    assert use.bubble == pytest.approx(0.5, abs=0.001)
