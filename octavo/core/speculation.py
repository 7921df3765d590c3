"""Speculation: how many guesses each request may bring to the next step.

A guess is worth the chance that it is right, and all before it; it costs what one more token adds
to the step. The chance is learnt by request, the cost is measured (``VerifyCost``). The choice is
the set of guesses with the most expected tokens a second; where it is empty a request rests, and
tries two guesses now and then, less often the longer they have been wrong.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from octavo.core.plan import Int32
from octavo.core.request import Request

Float64 = NDArray[np.float64]
Index = NDArray[np.intp]

# A request's chance is an average over about so many guesses: text changes from one to the next.
MEMORY = 0.88
# Of all requests, which a new one begins with as if it had seen so many guesses of its own.
COMMON_MEMORY, COMMON_WEIGHT = 0.98, 2.0
FIRST_CHANCE = 0.5
# What part of the guesses that a row may bring it really brings (n-grams match now and then).
SHARE_MEMORY = 0.8
SMALLEST_SHARE = 0.05
# Guesses must promise so much more than none: predictions are no better than a few per cent.
LEAST_GAIN = 1.02
# Steps that a request rests, doubled each time; guesses with which it tries again.
SHORTEST_REST, LONGEST_REST, TRIED = 4, 256, 2
# What tries may cost, as a share of all time; saved up to so many steps' worth.
TRIES_SHARE, FIRST_SAVED, MOST_SAVED = 0.01, 0.5, 4.0
# Steps after which one without guesses is due, so that it is known what they are compared with.
PLAIN_STEPS = 64


class VerifyCost(Protocol):
    """What steps of decoding rows cost, as measured; passed in, like the clock."""

    def seconds(self, num_rows: int, num_guesses: Float64) -> Float64 | None:
        """Of steps with so many rows, and with each of these numbers of guesses among them (0 is
        one of them). None before any step with so many rows was seen."""


@dataclass(slots=True)
class DraftCounters:
    """Running totals. A draft: what one row brought to one step, of at least one guess."""

    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted: int = 0
    accepted_at: list[int] = field(default_factory=list)  # by place of the guess in its draft
    drafted_at: list[int] = field(default_factory=list)


class Speculation:
    """Chances by slot, and the choice. ``most``: guesses of a row in a step."""

    def __init__(self, most: int, max_num_seqs: int, cost: VerifyCost, at_once: int = 0) -> None:
        """``at_once``: that many tokens are drawn together at most, and all rows bring as many,
        padding where they have fewer guesses: those with penalties bring none, and none does beside
        those with log-probabilities, grammars or edits of their logits. 0: each row by itself."""
        self.most = most
        self._at_once = at_once
        self._allowed = np.full(max_num_seqs, most)  # -1: nobody beside it
        self.counters = DraftCounters(accepted_at=[0] * most, drafted_at=[0] * most)
        self.length = 0.0  # guesses a row was allowed in the last step that could have any
        self._cost = cost
        self._right = np.zeros(max_num_seqs)  # decayed counts: guesses that were right
        self._tested = np.zeros(max_num_seqs)  # … and that were compared with a draw
        self._share = np.ones(max_num_seqs)
        self._rest = np.zeros(max_num_seqs, dtype=np.int64)  # steps until the next try
        self._resting = np.zeros(max_num_seqs, dtype=np.int64)  # steps of the rest that began last
        self._drafted = np.zeros(max_num_seqs, dtype=np.int64)  # of the request in the slot
        self._accepted = np.zeros(max_num_seqs, dtype=np.int64)
        self._common = np.array([FIRST_CHANCE, 1.0])  # decayed counts of all requests
        self._since_plain = 0
        self._credit = FIRST_SAVED  # steps' worth of time that tries may take
        self._group_rest = self._group_resting = 0  # of all rows, where they are drawn at once
        self._places = np.arange(1, most + 1)

    def enter(self, slot: int, request: Request) -> None:
        """A request takes a slot."""
        self._allowed[slot] = self._allowance(request) if self._at_once else self.most
        self._right[slot] = COMMON_WEIGHT * self._common[0] / self._common[1]
        self._tested[slot] = COMMON_WEIGHT
        self._share[slot] = 1.0
        self._rest[slot] = self._resting[slot] = 0
        self._drafted[slot] = self._accepted[slot] = 0

    def _allowance(self, request: Request) -> int:
        """Most guesses of a row; -1 where nobody may have any beside it."""
        params = request.params
        edited = params.logit_bias or params.allowed_token_ids or request.bad_words
        if edited or params.min_tokens or request.grammar or params.logprobs is not None:
            return -1
        penalties = (params.frequency_penalty, params.presence_penalty)
        return 0 if params.repetition_penalty != 1.0 or any(penalties) else self.most

    def leave(self, slot: int, request: Request) -> None:
        """It leaves the slot, with its counts."""
        request.num_drafts += int(self._drafted[slot])
        request.num_accepted_drafts += int(self._accepted[slot])
        self._drafted[slot] = self._accepted[slot] = 0

    # ---- the choice ----

    def choose(self, slots: Index, room: Int32, budget: int) -> Int32:
        """Most guesses of each row, int32 [n]. ``room``: that it could take, -1 for rows that
        do not decode: beside prompts there are no guesses. ``budget``: of all rows together."""
        none = np.zeros(len(slots), dtype=np.int32)
        most = np.minimum(room, self._allowed[slots])
        if not len(slots) or budget <= 0 or (most < 0).any() or not most.any():
            return none
        self._credit = min(self._credit + TRIES_SHARE, MOST_SAVED)
        self._since_plain += 1
        if self._since_plain > PLAIN_STEPS:
            self._since_plain = 0
            return none
        if self._at_once:
            chosen = self._best_width(slots, most, budget)
            self._take_turns(chosen, most, budget)
            self.length = float(chosen.mean())
            return chosen if chosen.any() else self._none(chosen)
        waiting = self._rest[slots] > 0
        self._rest[slots] -= waiting
        most = np.where(waiting, 0, most)
        if not most.any():
            return self._none(none)
        chosen = self._best(slots, most, budget)
        resting = (chosen == 0) & (most > 0)
        if resting.any():
            self._let_rest(slots, most, resting, chosen, budget - int(chosen.sum()))
        self.length = float(chosen.mean())
        return chosen if chosen.any() else self._none(chosen)

    def _none(self, chosen: Int32) -> Int32:
        self._since_plain, self.length = 0, 0.0
        return chosen

    def _best(self, slots: Index, most: Int32, budget: int) -> Int32:
        """The guesses with the most expected tokens a second, [n]. A row's come in order, since
        each is right less often than the one before it."""
        flat = self._gains(slots, most).ravel()
        order = np.argsort(-flat, kind="stable")[: min(budget, int(most.sum()))]
        rows = order // self.most
        gained = np.concatenate([[0.0], np.cumsum(flat[order])])
        added = np.concatenate([[0.0], np.cumsum(self._share[slots][rows])])
        seconds = self._cost.seconds(len(slots), added)
        if seconds is None:
            return np.zeros(len(slots), dtype=np.int32)
        best = _most_promising((len(slots) + gained) / seconds)
        return np.bincount(rows[:best], minlength=len(slots)).astype(np.int32)

    def _best_width(self, slots: Index, most: Int32, budget: int) -> Int32:
        """The same where all rows take the time of the one with the most guesses, [n]."""
        gained = np.concatenate([[0.0], np.cumsum(self._gains(slots, most).sum(axis=0))])
        guesses = np.arange(self.most + 1.0) * len(slots)
        seconds = self._cost.seconds(len(slots), guesses)
        if seconds is None:
            return np.zeros(len(slots), dtype=np.int32)
        rates = (len(slots) + gained) / seconds
        rates[guesses > min(budget, self._at_once - len(slots))] = 0.0
        return np.minimum(_most_promising(rates), most).astype(np.int32)

    def _gains(self, slots: Index, most: Int32) -> Float64:
        """Tokens to expect of each row's guesses, [n, most guesses]."""
        chance, share = self._right[slots] / self._tested[slots], self._share[slots]
        gains: Float64 = share[:, None] * chance[:, None] ** self._places
        gains[self._places > most[:, None]] = 0.0
        return gains

    def _let_rest(
        self, slots: Index, most: Int32, resting: NDArray[np.bool_], chosen: Int32, budget: int
    ) -> None:
        """Rows without guesses rest. One of those that have rested before tries some guesses."""
        rested = resting & (self._resting[slots] > 0)
        if rested.any() and budget >= TRIED and self._may_try(len(slots), TRIED):
            row = int(rested.argmax())
            chosen[row] = min(TRIED, int(most[row]))
            self._begin_rest(slots[row : row + 1])
            resting[row] = False
        first = slots[resting & ~rested]
        if len(first):
            self._begin_rest(first)
        later = slots[resting & rested]
        self._rest[later] = 1  # one tries in a step

    def _may_try(self, num_rows: int, num_guesses: int) -> bool:
        """Whether so many guesses may be made of which nothing is expected; they are paid for."""
        seconds = self._cost.seconds(num_rows, np.array([0.0, num_guesses]))
        price = 0.0 if seconds is None else float(seconds[1] / seconds[0]) - 1
        if price > self._credit:
            return False
        self._credit -= price
        return True

    def _take_turns(self, chosen: Int32, most: Int32, budget: int) -> None:
        """Where guesses of one row cost as much as those of all, all rest and try together."""
        if chosen.any():
            self._group_rest = self._group_resting = 0
        elif self._group_rest:
            self._group_rest -= 1
        else:
            tried = TRIED * len(chosen)
            room = min(budget, self._at_once - len(chosen))
            if self._group_resting and room >= tried and self._may_try(len(chosen), tried):
                chosen[:] = np.minimum(TRIED, most)
            self._group_resting = min(max(2 * self._group_resting, SHORTEST_REST), PLAIN_STEPS)
            self._group_rest = self._group_resting

    def _begin_rest(self, slots: Index) -> None:
        longer = np.clip(2 * self._resting[slots], SHORTEST_REST, LONGEST_REST)
        self._resting[slots] = self._rest[slots] = longer

    # ---- what came of it ----

    def observe(self, slots: Index, asked: Int32, drafted: Int32, accepted: Int32) -> None:
        """Rows that drew: guesses they were allowed, brought, and that were right, each [m]."""
        allowed = asked > 0
        if not allowed.any():
            return
        if not allowed.all():
            slots, asked = slots[allowed], asked[allowed]
            drafted, accepted = drafted[allowed], accepted[allowed]
        share = SHARE_MEMORY * self._share[slots] + (1 - SHARE_MEMORY) * (drafted / asked)
        self._share[slots] = np.maximum(share, SMALLEST_SHARE)
        brought = drafted > 0
        if not brought.any():
            return
        if not brought.all():
            slots, drafted, accepted = slots[brought], drafted[brought], accepted[brought]
        tested = np.minimum(drafted, accepted + 1)
        decay = MEMORY**tested
        self._right[slots] = decay * self._right[slots] + accepted
        self._tested[slots] = decay * self._tested[slots] + tested
        self._drafted[slots] += drafted
        self._accepted[slots] += accepted
        worthwhile = slots[accepted == drafted]
        self._rest[worthwhile] = self._resting[worthwhile] = 0
        total = int(tested.sum())
        self._common = COMMON_MEMORY**total * self._common + [int(accepted.sum()), total]
        self._count(drafted, accepted)

    def _count(self, drafted: Int32, accepted: Int32) -> None:
        counters = self.counters
        counters.num_drafts += len(drafted)
        counters.num_draft_tokens += int(drafted.sum())
        counters.num_accepted += int(accepted.sum())
        for place in range(int(drafted.max())):
            counters.drafted_at[place] += int(np.count_nonzero(drafted > place))
            counters.accepted_at[place] += int(np.count_nonzero(accepted > place))


def _most_promising(rates: Float64) -> int:
    """Where the most tokens a second are expected; 0, without guesses, where it is hardly more."""
    best = int(rates.argmax())
    return best if rates[best] >= LEAST_GAIN * rates[0] else 0
