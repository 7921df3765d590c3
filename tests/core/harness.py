"""A scheduler with a toy model: drives plans and results by hand, without tensors."""

from __future__ import annotations

import numpy as np

from octavo.core.block_pool import BlockPool, PrefixKeys, root_key
from octavo.core.fair import waiting_queue
from octavo.core.plan import SAMPLE, StepPlan, StepResult
from octavo.core.request import Request
from octavo.core.scheduler import Limits, Scheduler
from octavo.types import SamplingParams

EOS = 1


class Harness:
    """One scheduler, plans executed when the test says so; draws ``next_token`` (default 100)."""

    def __init__(self, *, num_blocks=64, block_size=4, caching=True, policy="fcfs", **limits):
        settings = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "max_model_len": 64}
        self.time = 0.0
        self.pool = BlockPool(num_blocks, block_size, caching)
        self.events = []
        self.cost = limits.pop("cost", None)
        speculation = limits.pop("speculation", None)
        self.scheduler = Scheduler(
            Limits(**{**settings, **limits}),
            self.pool,
            eos_ids=[EOS],
            clock=lambda: self.time,
            queue=waiting_queue(policy),
            cost=self.cost,
            speculation=speculation,
            on_event=self.events.append,
        )
        self.outputs: dict[int, list[int]] = {}
        self.handle = 0
        self.checks = True  # after every call; they take a while where there are many blocks

    def request(
        self,
        prompt,
        max_tokens=8,
        salt=b"",
        priority=0,
        pooling=None,
        tenant=b"",
        weight=1.0,
        **params,
    ) -> Request:
        self.handle += 1
        return Request(
            self.handle,
            np.array(prompt, dtype=np.int32),
            SamplingParams(max_tokens=max_tokens, **params),
            max_tokens,
            priority=priority,
            arrival=self.time,
            chain=PrefixKeys(root_key(salt), self.pool.block_size),
            pooling=pooling,
            tenant=tenant,
            weight=weight,
        )

    def add(self, prompt, max_tokens=8, **options) -> Request:
        request = self.request(prompt, max_tokens, **options)
        self.scheduler.add(request)
        return request

    def schedule(self) -> StepPlan | None:
        plan = self.scheduler.schedule()
        if self.checks:
            self.scheduler.check()
        return plan

    def finish(
        self,
        plan: StepPlan,
        token: int | dict[int, int] = 100,
        grammar_ends: dict[int, str] | None = None,
        undrawn: tuple[int, ...] = (),
    ):
        """Executes a plan: every drawing row draws ``token`` (or token[slot]). ``grammar_ends``: by
        slot; ``undrawn``: slots whose token does not count."""
        draws = (plan.flags & SAMPLE).astype(bool)
        drawn = [token.get(s, 100) if isinstance(token, dict) else token for s in plan.slots]
        told = {
            row: grammar_ends[slot]
            for row, slot in enumerate(plan.slots.tolist())
            if grammar_ends and slot in grammar_ends
        }
        result = StepResult(
            plan.step,
            np.where(draws, drawn, 0).astype(np.int32).reshape(-1, 1),
            (draws & ~np.isin(plan.slots, undrawn)).astype(np.int32),
            np.zeros(0, dtype=np.int32),
            grammar_ends=told,
        )
        update = self.scheduler.update(result)
        for handle, drawn_token in zip(update.handles.tolist(), update.tokens.tolist()):
            self.outputs.setdefault(handle, []).append(drawn_token)
        if self.checks:
            self.scheduler.check()
        return update

    def preempted(self) -> tuple[Request, Request, list[StepPlan]]:
        """An old request, a young one that lost its slot (row 1) to it, and the plans in flight
        that drew for both. Wants few blocks."""
        old, young = self.add(range(10, 18), 12), self.add(range(30, 38), 12)
        plans: list[StepPlan] = []
        while not young.num_preemptions:
            plan = self.schedule()
            if plan is None:
                self.finish(plans.pop(0))
            else:
                plans.append(plan)
        assert young.in_flight >= 1
        return old, young, plans

    def step(self, token=100):
        plan = self.schedule()
        return plan, self.finish(plan, token)

    def run(self, token=100, limit=1000):
        """Runs, two plans in flight, until nothing is left."""
        plans = []
        for _ in range(limit):
            while (plan := self.schedule()) is not None:
                plans.append(plan)
            if not plans:
                return
            self.finish(plans.pop(0), token)
        raise AssertionError("never ends")
