"""Guesses: what the scheduler does where rows may bring guesses to a step. How many they may bring
is ``core.speculation``'s.

A plan counts all guesses of its rows as right until its result is in: positions and block tables
are upper bounds for as long. Then what wrong ones had taken is given back. Nobody is preempted for
guesses, nor while a result is due that may give blocks back.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from octavo.core.block_pool import BlockPool
from octavo.core.plan import Int32, StepPlan, StepResult, laid_out
from octavo.core.running import Index, Running
from octavo.core.speculation import Speculation


class Guesses:
    def __init__(
        self, speculation: Speculation, running: Running, pool: BlockPool, eos_ids: list[int]
    ) -> None:
        self._speculation = speculation
        self._running = running
        self._pool = pool
        self._eos_ids = eos_ids

    # ---- a plan ----

    def choose(self, rows: Index, counts: Int32, budget: int) -> Int32:
        """Most guesses of each row beside its ``counts`` tokens, [n]: of those that decode, within
        the budget and their own limits. None where there are too few blocks for all."""
        running = self._running
        totals = running.total[rows]
        room = np.where(totals - running.computed[rows] == 1, running.limit[rows] - totals - 1, -1)
        drafts = self._speculation.choose(rows, room, budget)
        if self._missing_blocks(rows, counts + drafts) > self._pool.num_free:
            return np.zeros(len(rows), dtype=np.int32)
        return drafts

    def hold_blocks(self, rows: Index, counts: Int32, in_flight: Iterable[StepPlan]) -> bool:
        """Whether there are too few blocks for the rows, and a plan in flight may give some back:
        then no row is preempted before its result has come."""
        if self._missing_blocks(rows, counts) <= self._pool.num_free:
            return False
        return any(plan.most_drafts for plan in in_flight)

    def _missing_blocks(self, rows: Index, counts: Int32) -> int:
        """Of rows that outgrow theirs."""
        over = self._running.computed[rows] + counts - self._running.capacity[rows]
        return int(np.maximum(-(-over // self._pool.block_size), 0).sum())

    # ---- a result ----

    def take_runs(
        self, result: StepResult, plan: StepPlan, rows: Index, slots: Index
    ) -> tuple[Index, Int32, Int32, Int32]:
        """What the plan's ``rows`` of these ``slots`` drew: several tokens each, up to the one that
        ends a request. Returns (row of each token, tokens, the last one of each row, tokens known
        of each row then)."""
        running = self._running
        assert plan.num_drafts is not None and result.num_drafted is not None
        place, accepted, runs = running.known[slots], result.num_accepted[rows], result.tokens[rows]
        counts = self._up_to_ending(slots, runs, accepted)
        asked = plan.num_drafts[rows]
        self._speculation.observe(slots, asked, result.num_drafted[rows], accepted - 1)
        wrong = asked + 1 - accepted
        if wrong.any():
            running.total[slots] -= wrong
            running.computed[slots] -= wrong
            self._give_back_blocks(slots[wrong > 0])
        each, offsets = laid_out(counts)
        tokens = runs[each, offsets]
        running.tokens[slots[each], place[each] + offsets] = tokens
        last = runs[np.arange(len(rows)), counts - 1]
        return rows[each], tokens, last, place + counts

    def _up_to_ending(self, slots: Index, runs: Int32, accepted: Int32) -> Int32:
        """Tokens of each row up to the first that ends its request, [m] of ``accepted``."""
        running = self._running
        if not len(slots) or accepted.max() <= 1:
            return accepted
        places = np.arange(1, runs.shape[1] + 1)
        lengths = running.known[slots][:, None] + places
        ends = np.isin(runs, self._eos_ids) & (lengths >= running.stop_from[slots][:, None])
        if running.watched:
            for row in np.nonzero(np.isin(slots, list(running.watched)))[0].tolist():
                request = running.at(int(slots[row]))
                for index, token in enumerate(runs[row].tolist()):
                    length = int(lengths[row, index])
                    ends[row, index] |= request.ending(token, length, self._eos_ids) is not None
        ends &= places <= accepted[:, None]
        return np.where(ends.any(axis=1), ends.argmax(axis=1) + 1, accepted).astype(np.int32)

    def _give_back_blocks(self, slots: Index) -> None:
        """Blocks behind the next token of each slot."""
        running, size = self._running, self._pool.block_size
        excess = (running.capacity[slots] - running.computed[slots] - 1) // size
        given = (excess > 0).nonzero()[0]
        if not len(given):
            return
        running.capacity[slots[given]] -= excess[given] * size
        for slot, count in zip(slots[given].tolist(), excess[given].tolist()):
            blocks = running.at(slot).blocks
            self._pool.release(blocks[-count:])
            del blocks[-count:]
