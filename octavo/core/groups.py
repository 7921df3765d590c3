"""Groups: what each plan takes where the stages of a pipeline compute several plans at once.

Only the last stage draws, and only the result of a plan brings a token to the first one. So a row
that draws waits for its result: plans in flight have no decoding row in common. They take about
equal numbers of them, since a stage that computes a large plan keeps the others waiting.
"""

from __future__ import annotations

import numpy as np

from octavo.core.plan import Int32
from octavo.core.running import Index, Running

# Prompts are divided among plans in no smaller shares, in tokens: a step of fewer hardly takes less
# time, since it still reads all weights. Beside decoding rows they are read anyway.
MIN_SHARE, MIN_SHARE_BESIDE = 512, 128


class Groups:
    """No group has members of its own: a plan takes its share of the rows that are ready, those
    first that have waited longest. So groups stay equal while rows come and go, and no row is
    passed over twice by the same other one."""

    def __init__(self, stages: int, max_num_seqs: int) -> None:
        self.stages = stages
        self._latest = np.zeros(max_num_seqs, dtype=np.int64)  # the step that each slot was in

    def choose(self, running: Running, need: Int32, num_in_flight: int) -> tuple[int, int]:
        """``need``: tokens that each running row, in their order, could compute; set to 0 for those
        that wait for their result or for another plan, of those that ``num_in_flight`` leave room
        for. Returns the number of decoding rows, those in flight included, and a plan's share."""
        order = running.order
        waiting = running.total[order] > running.known[order]
        need[waiting] = 0
        ready = (need == 1).nonzero()[0]
        count = len(ready) + int(np.count_nonzero(waiting))
        share = -(-count // self.stages)
        # Five rows on four stages: two and three times one, so that no stage goes without any.
        most = min(share, -(-len(ready) // (self.stages - num_in_flight)))
        if len(ready) > most:
            by_age = self._latest[order[ready]].argsort(kind="stable")
            need[ready[by_age[most:]]] = 0
        return count, share

    def issued(self, slots: Index, step: int) -> None:
        self._latest[slots] = step

    def prompt_share(self, num_tokens: int, beside: bool) -> int:
        """Most prompt tokens of a plan while so many are in flight or could be computed: they are
        divided among the stages, so that none of them waits for one large plan. ``beside``: there
        are decoding rows."""
        pieces = min(self.stages, num_tokens // (MIN_SHARE_BESIDE if beside else MIN_SHARE))
        return -(-num_tokens // pieces) if pieces > 1 else num_tokens
