"""What ``test_scheduler_properties`` shows holds with several pipeline stages too, whose plans in
flight never need an id that is still to be drawn (``ToyEngine._check_stages``)."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import initialize

from tests.exactness.test_scheduler_properties import SchedulerMachine, settings_from, simulate
from tests.exactness.toy_engine import ToyEngine


class PipelineMachine(SchedulerMachine):
    @initialize(data=st.data(), stages=st.integers(2, 4))
    def start(self, data, stages):
        settings = settings_from(self.integer(data))
        self.engine = ToyEngine(replace(settings, stages=stages))


TestPipeline = PipelineMachine.TestCase


@pytest.mark.parametrize("stages", (2, 3, 4))
def test_random_lives_end_as_the_toy_oracle_says(stages):
    """And reach every feature: hits, copies and preemptions, plans in flight on all stages."""
    preemptions = copies = hits = 0
    for seed in range(1000, 1016):
        counters = simulate(seed, num_requests=60, stages=stages).scheduler.counters
        preemptions += counters.preemptions
        copies += counters.copies
        hits += counters.prefix_hits
    assert preemptions > 20 and copies > 20 and hits > 200
