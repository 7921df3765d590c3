"""Several pipeline stages: plans in flight have no drawing row in common, and are about equal."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable

import numpy as np
import pytest

from octavo.core.plan import SAMPLE, StepPlan
from octavo.types import FinishReason
from tests.core.harness import EOS, Harness


class Pipeline:
    """Stages in virtual time: each computes a plan when the one before has, and it is free."""

    def __init__(
        self,
        harness: Harness,
        seconds: Callable[[StepPlan], float] = lambda plan: 1.0,
        latency: float = 0.0,
    ) -> None:
        """``seconds``: of a stage for a plan; ``latency``: from the last stage's end until the
        scheduler has the result."""
        self.harness = harness
        self.stages = harness.scheduler.limits.stages
        self.seconds, self.latency = seconds, latency
        self.busy = 0.0
        self.plans: list[StepPlan] = []
        self._free = [0.0] * self.stages
        self._results: deque[tuple[float, StepPlan]] = deque()

    def issue(self) -> None:
        while (plan := self.harness.schedule()) is not None:
            ready, taken = self.harness.time, self.seconds(plan)
            for stage, free in enumerate(self._free):
                ready = self._free[stage] = max(ready, free) + taken
            self.busy += self.stages * taken
            self.plans.append(plan)
            self._results.append((ready + self.latency, plan))

    def collect(self, token: int | dict[int, int] = 100) -> bool:
        """False where no plan is in flight."""
        self.issue()
        if not self._results:
            self.harness.scheduler.check()
            return False
        self.harness.time, plan = self._results.popleft()
        self.harness.finish(plan, token)
        return True

    @property
    def bubble(self) -> float:
        """Share of the time until now in which stages had nothing to do."""
        return 1 - self.busy / (self.stages * self.harness.time)


def make(stages: int, rows: int = 8, **limits) -> Harness:
    settings = {"max_num_seqs": rows, "max_num_batched_tokens": 4096, "max_model_len": 4096}
    harness = Harness(num_blocks=16384, stages=stages, **{**settings, **limits})
    harness.checks = False
    return harness


@pytest.mark.parametrize("stages", (2, 3, 4))
@pytest.mark.parametrize("rows", (1, 3, 5, 64))
def test_equal_rows_are_divided_evenly_and_take_turns(stages, rows):
    h = make(stages, rows)
    for row in range(rows):
        h.add([10 + row], max_tokens=60)
    pipeline = Pipeline(h)
    while pipeline.collect():
        pass
    decoding = [plan for plan in pipeline.plans if not plan.new_requests]
    sizes = [plan.num_rows for plan in decoding]
    assert max(sizes) == -(-rows // stages) and max(sizes) - min(sizes) <= 1
    last: dict[int, int] = {}
    for index, plan in enumerate(decoding):
        for slot in plan.slots.tolist():
            assert index - last.get(slot, index) <= stages
            last[slot] = index
    assert all(len(tokens) == 60 for tokens in h.outputs.values())
    if rows >= stages:
        assert pipeline.bubble < 0.04  # filling and draining, in one of 60 turns


def test_as_many_plans_as_stages_keep_all_busy_but_for_the_way_of_a_result():
    """A plan more in flight would hide the latency and make each group smaller: with three groups
    of 16 on two stages a row would wait for three steps, not two and the latency."""
    h = make(2, 48)
    for row in range(48):
        h.add([10 + row], max_tokens=400)
    pipeline = Pipeline(h, latency=0.05)
    while pipeline.collect():
        pass
    assert pipeline.bubble == pytest.approx(0.05 / 2.05, abs=0.005)


def test_no_row_is_in_two_plans_in_flight_and_ends_cost_nothing():
    """Unlike with one stage, where a row that ends by EOS is computed once more."""
    h = make(2)
    first, second = h.add([5, 6]), h.add([7, 8])
    prompts = h.schedule()
    assert h.schedule() is None
    h.finish(prompts)
    a, b = h.schedule(), h.schedule()
    assert [a.num_rows, b.num_rows] == [1, 1] and a.slots[0] != b.slots[0]
    assert h.schedule() is None
    h.finish(a, EOS)
    assert first.finish_reason is FinishReason.STOP
    assert h.schedule() is None  # the other row's result is to come
    h.finish(b)
    assert h.schedule().slots.tolist() == [second.slot]


def test_chunks_of_a_prompt_are_in_flight_together_and_the_last_one_draws():
    h = make(3, max_num_batched_tokens=8)
    request = h.add(range(10, 30), max_tokens=2)
    plans = [h.schedule() for _ in range(3)]
    assert [(int(p.starts[0]), int(p.num_tokens[0])) for p in plans] == [(0, 8), (8, 8), (16, 4)]
    assert [int(plan.flags[0] & SAMPLE) for plan in plans] == [0, 0, 1]
    h.finish(plans[0])
    assert h.schedule() is None
    h.finish(plans[1])
    h.finish(plans[2])
    plan = h.schedule()
    assert plan.starts.tolist() == [20]
    h.finish(plan)
    assert request.finish_reason is FinishReason.LENGTH


def test_prompts_are_divided_among_the_stages_but_not_into_crumbs():
    h = make(4, max_num_batched_tokens=8192, max_model_len=8192)
    h.add(range(3, 4003))
    h.add(range(4003, 8003))
    plans = [h.schedule() for _ in range(4)]
    assert [plan.total_tokens for plan in plans] == [2000] * 4
    assert h.schedule() is None
    h = make(4)
    h.add(range(1023))
    assert h.schedule().total_tokens == 1023
    h = make(4)
    h.add(range(1600))
    assert [h.schedule().total_tokens for _ in range(3)] == [534, 533, 533]


class Costs:
    """Remembers what was asked."""

    asked = (0, 0)

    def chunk_limit(self, num_decode_rows: int, num_prompts: int) -> int:
        self.asked = num_decode_rows, num_prompts
        return 200


def test_beside_a_group_a_chunk_is_what_the_cost_table_allows():
    """Also in a plan without decoding rows: others wait for it on the stages."""
    costs = Costs()
    h = make(2, 8, cost=costs)
    for row in range(3):
        h.add([10 + row])
    h.step()
    for row in range(4):
        h.add(range(1000 * row, 1000 * row + 900))
    plans = [h.schedule(), h.schedule()]
    assert [plan.num_tokens.tolist() for plan in plans] == [[1, 1, 200], [1, 200]]
    assert costs.asked == (2, 2)  # of three rows and of four prompts, half
    h.finish(plans[0])
    h.scheduler.abort(h.scheduler.running.at(int(plans[0].slots[0])))
    h.scheduler.abort(h.scheduler.running.at(int(plans[0].slots[1])))
    plan = h.schedule()
    assert plan.num_tokens.tolist() == [200] and not plan.flags.any()
    assert costs.asked == (1, 2)


def test_without_adaptive_chunks_prompts_take_the_budget():
    h = make(2, adaptive_chunks=False, max_num_batched_tokens=600, cost=Costs())
    h.add([5, 6])
    h.step()
    h.add(range(2000))
    assert h.schedule().num_tokens.tolist() == [1, 599]
    assert h.schedule().num_tokens.tolist() == [600]


def test_rows_that_come_and_go_stay_balanced_and_none_starves():
    draw = random.Random(5)
    h = make(3, 24)
    pipeline = Pipeline(h)
    waited: list[int] = []
    last: dict[tuple[int, int], int] = {}
    for _ in range(900):
        if draw.random() < 0.3:
            h.add(draw.choices(range(3, 900), k=draw.randint(1, 30)), draw.randint(1, 120))
        before = len(pipeline.plans)
        pipeline.collect(EOS if draw.random() < 0.02 else 100)
        for index in range(before, len(pipeline.plans)):
            plan = pipeline.plans[index]
            for slot in plan.slots.tolist():
                key = (slot, int(h.scheduler.running.handles[slot]))
                waited.append(index - last.get(key, index))
                last[key] = index
    sizes = np.array([plan.num_rows for plan in pipeline.plans[100:]])
    assert sizes.mean() > 5 and sizes.std() < 1.5
    assert max(waited) <= 2 * 3 and np.mean(waited) < 3.1
    while pipeline.collect():
        pass


def test_a_group_that_loses_all_its_blocks_makes_way_for_the_others():
    """Three blocks each of four for two rows: the younger one is preempted, though the plan was to
    be its own, and the older one runs on in the same call."""
    h = Harness(num_blocks=5, block_size=4, stages=2, max_num_batched_tokens=64)
    old, young = h.add(range(10, 18), 12), h.add(range(30, 38), 12)
    pipeline = Pipeline(h)
    while pipeline.collect():
        pass
    assert young.num_preemptions > 0 and old.num_preemptions == 0
    assert [len(h.outputs[request.handle]) for request in (old, young)] == [12, 12]


def test_a_mixed_load_keeps_the_stages_busy():
    """A plan costs a unit, and one more for each 500 tokens: prompts make plans unequal, and each
    inequality is a bubble on every other stage."""
    draw = random.Random(7)
    h = make(4, 64, cost=Costs(), max_num_batched_tokens=2048)
    pipeline = Pipeline(h, lambda plan: 1 + plan.total_tokens / 500)
    for _ in range(300):
        h.add(draw.choices(range(3, 9000), k=draw.randint(10, 1500)), draw.randint(20, 300))
    while len(h.scheduler.waiting):
        pipeline.collect()
    assert pipeline.bubble < 0.1


def test_groups_that_have_become_unequal_even_out():
    """Two groups of eight, of which one loses seven rows at once."""
    h = make(2, 16)
    for row in range(16):
        h.add([10 + row], max_tokens=100)
    pipeline = Pipeline(h)
    for _ in range(6):
        pipeline.collect()
    pipeline.issue()
    plan = pipeline.plans[-2]
    pipeline.collect(dict.fromkeys(plan.slots.tolist()[1:], EOS))
    for _ in range(3):
        pipeline.collect()
    pipeline.issue()
    assert sorted(plan.num_rows for plan in pipeline.plans[-2:]) == [4, 5]
