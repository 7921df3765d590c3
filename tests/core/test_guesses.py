"""The scheduler beside guesses: what wrong ones took is given back, what ends a request cuts a run,
and nobody loses its place for a guess."""

from __future__ import annotations

import numpy as np
import pytest

from octavo.core.plan import SAMPLE, StepPlan, StepResult
from octavo.core.speculation import Speculation
from octavo.types import FinishReason
from tests.core.harness import EOS, Harness
from tests.exactness.toy_engine import Free


class Guessing(Harness):
    """Every row may bring ``guesses``, as they cost nothing."""

    def __init__(self, guesses=4, max_num_seqs=8, **limits):
        speculation = Speculation(guesses, max_num_seqs, Free())
        super().__init__(max_num_seqs=max_num_seqs, speculation=speculation, **limits)

    def draw(self, plan: StepPlan, runs: dict[int, list[int]] | None = None):
        """Each drawing row draws its run (default: 100), having brought all guesses it could."""
        draws = (plan.flags & SAMPLE) != 0
        tokens = np.full((plan.num_rows, 1 + plan.most_drafts), -1, dtype=np.int32)
        counts = np.zeros(plan.num_rows, dtype=np.int32)
        for row in draws.nonzero()[0].tolist():
            run = (runs or {}).get(int(plan.slots[row]), [100])
            assert len(run) <= 1 + plan.num_drafts[row]
            tokens[row, : len(run)], counts[row] = run, len(run)
        none = np.zeros(0, dtype=np.int32)
        result = StepResult(plan.step, tokens, counts, none, num_drafted=plan.num_drafts)
        update = self.scheduler.update(result)
        for handle, token in zip(update.handles.tolist(), update.tokens.tolist()):
            self.outputs.setdefault(handle, []).append(token)
        self.scheduler.check()
        return update

    def started(self, prompt=(5, 6, 7), max_tokens=20, **options):
        """A request that has drawn its first token, 100."""
        request = self.add(list(prompt), max_tokens, **options)
        self.draw(self.schedule())
        return request


def test_a_plan_has_rows_with_guesses_and_their_blocks():
    h = Guessing(guesses=6)
    request = h.started()
    plan = h.schedule()
    assert plan.num_tokens.tolist() == [7] and plan.num_drafts.tolist() == [6]
    assert plan.num_known.tolist() == [1] and plan.starts.tolist() == [3]
    assert plan.flags.tolist() == [SAMPLE]
    assert len(request.blocks) == 3  # for ten tokens


@pytest.mark.parametrize(("accepted", "blocks"), [(1, 2), (4, 2), (5, 3), (7, 3)])
def test_blocks_of_wrong_guesses_are_given_back(accepted, blocks):
    """Blocks of four: one stays for the token that is computed next."""
    h = Guessing(guesses=6)
    request = h.started()
    h.draw(h.schedule(), {0: [*range(50, 50 + accepted)]})
    assert h.outputs[request.handle] == [100, *range(50, 50 + accepted)]
    assert len(request.blocks) == blocks == h.pool.num_held
    again = h.schedule()
    assert again.starts.tolist() == [3 + accepted] and again.num_known.tolist() == [1]


def test_with_a_plan_in_flight_its_tokens_keep_their_places():
    h = Guessing(guesses=6)
    request = h.started()
    first, second = h.schedule(), h.schedule()
    assert second.starts.tolist() == [10]  # should all guesses be right
    assert len(request.blocks) == 5
    h.draw(first, {0: [50, 51]})
    assert len(request.blocks) == 4  # up to 5 known, 1 and 6 guesses to come, and one more
    third = h.schedule()
    assert third.starts.tolist() == [12]
    h.draw(second, {0: [52]})
    h.draw(third, {0: [53, 54, 55]})
    assert h.outputs[request.handle] == [100, 50, 51, 52, 53, 54, 55]
    assert h.scheduler.running.tokens[0, :10].tolist() == [5, 6, 7, *h.outputs[request.handle]]


def test_there_are_no_more_guesses_than_tokens_may_follow():
    h = Guessing(guesses=8)
    request = h.started(max_tokens=4)
    plan = h.schedule()
    assert plan.num_drafts.tolist() == [2]
    assert h.schedule() is None  # there is nothing more for it to draw
    h.draw(plan, {0: [50, 51, 52]})
    assert request.finish_reason is FinishReason.LENGTH and h.pool.num_held == 0
    assert h.outputs[request.handle] == [100, 50, 51, 52]


def test_what_plans_in_flight_may_draw_counts_in_the_length():
    h = Guessing(guesses=3)
    request = h.started(max_tokens=8)
    first, second = h.schedule(), h.schedule()
    assert (first.num_drafts.tolist(), second.num_drafts.tolist()) == ([3], [2])
    h.draw(first, {0: [50]})
    third = h.schedule()
    assert third.num_drafts.tolist() == [2]
    h.draw(second, {0: [51, 52, 53]})
    h.draw(third, {0: [54, 55, 56]})
    assert h.outputs[request.handle] == [100, 50, 51, 52, 53, 54, 55, 56]
    assert request.finish_reason is FinishReason.LENGTH


ENDINGS = [
    ({}, [50, EOS, 51, 52], 2, FinishReason.STOP, None),
    ({}, [50, 51, 52, EOS], 4, FinishReason.STOP, None),
    ({"ignore_eos": True}, [50, EOS, 51, EOS], 4, None, None),
    ({"min_tokens": 3}, [EOS, EOS, EOS, 51, 52], 3, FinishReason.STOP, None),
    ({"stop_token_ids": [77]}, [50, 77, EOS, 77], 2, FinishReason.STOP, 77),
    ({"stop_token_ids": [77]}, [EOS, 77, 50, 50], 1, FinishReason.STOP, None),
    ({"stop_token_ids": [77], "min_tokens": 4}, [77, EOS, 77, 77, 50], 4, FinishReason.STOP, 77),
    ({"stop_token_ids": [77], "ignore_eos": True}, [EOS, 77, 50], 2, FinishReason.STOP, 77),
    ({"max_tokens": 5}, [50, 51, 52, 53], 4, FinishReason.LENGTH, None),
    ({"max_tokens": 5}, [50, 51, EOS, 53], 3, FinishReason.STOP, None),
    ({"max_tokens": 5}, [50, 51, 52, EOS], 4, FinishReason.STOP, None),
]


@pytest.mark.parametrize("in_flight", [False, True])
@pytest.mark.parametrize(("options", "run", "count", "reason", "stop_id"), ENDINGS)
def test_the_first_token_that_ends_a_request_cuts_its_run(
    options, run, count, reason, stop_id, in_flight
):
    h = Guessing()
    request = h.add([5, 6, 7], **{"max_tokens": 20, **options})
    other = h.add([8, 9], max_tokens=3)
    h.draw(h.schedule())
    plan = h.schedule()
    later = h.schedule() if in_flight else None
    update = h.draw(plan, {request.slot: run})
    assert h.outputs[request.handle] == [100, *run[:count]]
    assert (request.finish_reason, request.stop_reason) == (reason, stop_id)
    assert (request in update.finished) == (reason is not None)
    if later is not None:  # of an ended one this is dropped
        h.draw(later)
        assert len(h.outputs[request.handle]) == 1 + count + (reason is None)
    while h.scheduler.has_work:
        h.draw(h.schedule())
    assert len(h.outputs[other.handle]) == 3 and h.pool.num_held == 0


def test_an_ended_requests_tokens_are_found_again_up_to_its_end():
    h = Guessing(guesses=6)
    h.started(range(10, 17))
    h.draw(h.schedule(), {0: [50, 51, EOS, 52, 53]})
    again = h.add([*range(10, 17), 100, 50, 51, EOS, 60], max_tokens=1)
    h.draw(h.schedule())
    assert again.num_cached_tokens == 11
    other = h.add([*range(10, 17), 100, 50, 51, EOS, 52, 53, 60], max_tokens=1)
    h.draw(h.schedule())
    assert other.num_cached_tokens == 11


def test_nobody_is_preempted_for_guesses():
    """Blocks for the tokens that must be computed are there, for guesses they are not."""
    h = Guessing(guesses=8, num_blocks=5, max_in_flight=1)
    old, young = h.add(range(10, 17), 6), h.add(range(30, 37), 6)
    h.draw(h.schedule())
    assert h.pool.num_free == 1
    plan = h.schedule()
    assert plan.num_drafts.tolist() == [0, 0]  # three blocks each
    h.draw(plan)
    plan = h.schedule()  # a second block is missing for what must be computed
    assert young.num_preemptions == 1 and not old.num_preemptions
    assert plan.num_drafts.tolist() == [0]
    while h.scheduler.has_work:
        h.draw(plan)
        plan = h.schedule()
    assert h.outputs == {old.handle: [100] * 6, young.handle: [100] * 6}
    assert h.scheduler.speculation.counters.num_drafts > 0


def test_beside_a_prompt_in_pieces_no_row_brings_guesses():
    h = Guessing(max_num_batched_tokens=8)
    h.started()
    h.add(range(10, 30), max_tokens=2)
    for _ in range(3):
        plan = h.schedule()
        if int(plan.num_tokens.max()) > 1 and not len(plan.new_requests):
            assert plan.num_drafts.tolist() == [0, 0]
        h.draw(plan)


def preempted(h: Guessing):
    """Of two requests the young one, which has lost its slot while it draws."""
    h.started(range(10, 14))
    young = h.started(range(30, 34))
    plan = h.schedule()
    assert plan.num_drafts.min() > 0
    h.scheduler._preempt(young.slot)
    h.scheduler.check()
    assert young.in_flight == 1
    return young, plan


def test_a_preempted_request_takes_all_that_it_drew():
    h = Guessing()
    young, plan = preempted(h)
    update = h.draw(plan, {0: [50], 1: [60, 61, 62]})
    assert h.outputs[young.handle] == [100, 60, 61, 62]
    assert update.rows.tolist() == [0, 1, 1, 1] and young.num_output == 4
    again = h.schedule()
    assert again.new_token_ids.tolist() == [*range(30, 34), 100, 60, 61, 62]
    while h.scheduler.has_work:
        h.draw(again)
        again = h.schedule()
    assert len(h.outputs[young.handle]) == 20


@pytest.mark.parametrize(("token", "stop_id"), [(EOS, None), (77, 77)])
def test_a_preempted_request_may_end_inside_its_run(token, stop_id):
    h = Guessing()
    young, plan = preempted(h)
    young.stop_ids = frozenset([77])
    update = h.draw(plan, {0: [50, 51], 1: [60, token, 62]})
    assert h.outputs[young.handle] == [100, 60, token]
    assert (young.finish_reason, young.stop_reason) == (FinishReason.STOP, stop_id)
    assert update.finished == [young] and not len(h.scheduler.waiting)


def test_what_was_guessed_is_told_of_each_request():
    h = Guessing()
    request = h.started()
    h.draw(h.schedule(), {0: [50, 51]})
    h.draw(h.schedule(), {0: [52, 53, 54, EOS]})
    assert (request.num_drafts, request.num_accepted_drafts) == (8, 4)
    counters = h.scheduler.speculation.counters
    assert (counters.num_draft_tokens, counters.num_accepted) == (8, 4)
    assert counters.accepted_at == [2, 1, 1, 0]


def test_blocks_that_guesses_in_flight_hold_are_waited_for():
    """Two rows end in the blocks there are; wrong guesses hold some of them for a while."""
    h = Guessing(guesses=4, num_blocks=6)
    old, young = h.add(range(10, 17), 9), h.add(range(30, 37), 9)
    plans = []
    while h.scheduler.has_work:
        while (plan := h.schedule()) is not None:
            plans.append(plan)
        ends = len(h.outputs.get(old.handle, [])) == 4
        h.draw(plans.pop(0), {0: [EOS], 1: [EOS]} if ends else None)
    assert h.outputs == {old.handle: [100] * 4 + [EOS], young.handle: [100] * 4 + [EOS]}
    assert not old.num_preemptions + young.num_preemptions
    assert h.scheduler.speculation.counters.num_drafts > 0
