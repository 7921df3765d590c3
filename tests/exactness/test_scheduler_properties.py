"""Whatever happens, every request ends with the output it would have had alone, and nothing leaks.

Random arrivals, sizes, priorities, tenants, aborts, failures and delays drive the real scheduler
and block pool against a worker that notices every wrong position (tests/fixtures/toy.py). More than
CI runs: ``pytest tests/exactness --hypothesis-profile=explore``.
"""

from __future__ import annotations

import contextlib
import random
from dataclasses import replace

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from octavo.types import InvalidRequest
from tests.exactness.toy_engine import Choice, Settings, ToyEngine
from tests.fixtures import toy

SALTS = (b"", b"tenant")
# Prompts share beginnings: a hit, a partial hit and a collision in mid-block are all likely.
STEMS = [
    [2 + (stem * 7 + index * (stem + 1)) % (toy.VOCAB - 2) for index in range(40)]
    for stem in range(3)
]


def settings_from(integer) -> Settings:
    """Settings drawn with ``integer(lo, hi)``; chunking off needs a budget for whole prompts."""
    chunked = integer(0, 4) > 0
    max_model_len = 48
    policy = ("fcfs", "fair", "priority")[integer(0, 2)]
    return Settings(
        num_blocks=integer(4, 24),
        block_size=(1, 2, 3, 4, 8, 16)[integer(0, 5)],
        max_num_seqs=integer(1, 6),
        max_num_batched_tokens=integer(6, 24) if chunked else max_model_len,
        max_model_len=max_model_len,
        max_in_flight=integer(1, 3),
        caching=integer(0, 4) > 0,
        chunked_prefill=chunked,
        long_prefill_threshold=integer(1, 7) if chunked and integer(0, 3) == 0 else 0,
        policy=policy,
        ageing=0.01 if policy == "priority" and integer(0, 1) else 0.0,
        guesses=integer(1, 6) if integer(0, 1) else 0,
    )


def request_from(integer, ended: list[Choice]) -> dict:
    """Arguments of ``ToyEngine.add``: often a known beginning, sometimes a whole conversation."""
    salt = SALTS[integer(0, 5) == 0]
    if ended and integer(0, 2) == 0:
        earlier = ended[integer(0, len(ended) - 1)]
        history = earlier.prompt + earlier.tokens
        prompt = history[: integer(1, len(history))]
        salt = earlier.salt if integer(0, 3) else salt
    else:
        prompt = STEMS[integer(0, len(STEMS) - 1)][: integer(1, 30)]
    prompt = prompt + [integer(2, 4) for _ in range(integer(0, 3))]
    max_tokens = integer(1, 12)
    return {
        "prompt": prompt,
        "max_tokens": max_tokens,
        "salt": salt,
        "n": (1, 1, 1, 2, 4)[integer(0, 4)],
        "priority": integer(-1, 2),
        "min_tokens": integer(0, max_tokens) if integer(0, 3) == 0 else 0,
        "stop_token_ids": (toy.STOP_ID,) if integer(0, 3) == 0 else (),
        "ignore_eos": integer(0, 3) == 0,
        "logprobs": integer(0, 3) if integer(0, 4) == 0 else None,
        "prompt_logprobs": integer(0, 2) if integer(0, 6) == 0 else None,
    }


def silent_request_from(integer) -> dict:
    """max_tokens 0: only the prompt's log-probabilities are wanted, or not even those."""
    return {
        "prompt": STEMS[0][: integer(1, 20)],
        "max_tokens": 0,
        "prompt_logprobs": 1 if integer(0, 1) else None,
    }


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(data=st.data())
    def start(self, data):
        self.engine = ToyEngine(settings_from(self.integer(data)))

    @staticmethod
    def integer(data):
        return lambda low, high: data.draw(st.integers(low, high))

    @property
    def choices(self) -> list[Choice]:
        return list(self.engine.choices.values())

    @rule(data=st.data())
    def arrive(self, data):
        ended = [choice for choice in self.choices if choice.finished]
        try:
            self.engine.add(**request_from(self.integer(data), ended))
        except InvalidRequest as refusal:
            assert any(word in str(refusal) for word in ("blocks", "maximum length"))

    @rule(data=st.data())
    def arrive_silent(self, data):
        try:
            self.engine.add(**silent_request_from(self.integer(data)))
        except InvalidRequest as refusal:
            assert "blocks" in str(refusal)

    @rule(now=st.booleans())
    def issue(self, now):
        self.engine.issue(execute_now=now)

    @rule()
    def collect(self):
        self.engine.collect()

    @rule(count=st.integers(1, 8))
    def run(self, count):
        for _ in range(count):
            self.engine.step()

    @precondition(lambda self: any(not choice.finished for choice in self.choices))
    @rule(data=st.data())
    def leave(self, data):
        alive = [choice for choice in self.choices if not choice.finished]
        self.engine.abort(data.draw(st.sampled_from(alive)))

    @rule()
    def reset(self):
        self.engine.reset_prefix_cache()

    @precondition(lambda self: self.engine.in_flight)
    @rule()
    def fail(self):
        self.engine.fail()

    @invariant()
    def blocks_add_up(self):
        if hasattr(self, "engine"):
            pool = self.engine.pool
            assert pool.num_held + pool.num_free == pool.num_blocks
            assert 0 <= pool.num_cached <= pool.num_free

    def teardown(self):
        if hasattr(self, "engine"):
            self.engine.finish()


TestScheduler = SchedulerMachine.TestCase


def simulate(seed: int, num_requests: int, stages: int = 1) -> ToyEngine:
    """A longer life than the state machine's, without its power to shrink."""
    rng = random.Random(seed)
    engine = ToyEngine(replace(settings_from(rng.randint), stages=stages))
    for _ in range(num_requests):
        ended = [choice for choice in engine.choices.values() if choice.finished]
        with contextlib.suppress(InvalidRequest):
            engine.add(**request_from(rng.randint, ended[-20:]))
        for _ in range(rng.choice((0, 0, 1, 2, 5))):
            action = rng.random()
            alive = [choice for choice in engine.choices.values() if not choice.finished]
            if action < 0.45:
                engine.issue(execute_now=rng.random() < 0.5)
            elif action < 0.9:
                engine.collect()
            elif action < 0.96 and alive:
                engine.abort(rng.choice(alive))
            elif action < 0.97:
                engine.reset_prefix_cache()
            elif action < 0.975:
                engine.fail()
    engine.finish()
    return engine


@pytest.mark.parametrize("first_seed", range(0, 200, 20))
def test_random_lives_end_as_the_toy_oracle_says(first_seed):
    for seed in range(first_seed, first_seed + 20):
        simulate(seed, num_requests=60)


def test_random_lives_reach_every_feature():
    """The lives above are worth something: hits, copies, preemptions and overruns all occur."""
    preemptions = copies = hits = 0
    for seed in range(40):
        engine = simulate(seed, num_requests=60)
        counters = engine.scheduler.counters
        preemptions += counters.preemptions
        hits += counters.prefix_hits
        assert counters.copies == engine.worker.num_copies
        copies += counters.copies
    assert preemptions > 50 and copies > 50 and hits > 500
