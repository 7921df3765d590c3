"""What this server has answered lately is guessed again; and two proposers as one."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from octavo.core.plan import StepPlan
from octavo.speculation import Speculating
from octavo.worker.slots import Slots
from octavo.worker.speculative.combine import FirstOf, make_proposer
from octavo.worker.speculative.ngram import NgramProposer
from octavo.worker.speculative.proposer import Int32, Silent
from octavo.worker.speculative.suffix import BREAK, RecentOutputs, SuffixProposer
from tests.worker.plans import New, Row, int32, plan


@given(st.lists(st.lists(st.integers(0, 9), max_size=40), max_size=12), st.integers(4, 20))
def test_recent_outputs_are_the_end_of_all_that_were(outputs, kept):
    recent, everything = RecentOutputs(kept), []
    for output in outputs:
        recent.add(int32(output))
        everything += [*output[-(kept - 1) :], BREAK]
        ids = recent.ids.tolist()
        assert ids == everything[len(everything) - len(ids) :]
        assert min(len(everything), kept) <= len(ids) <= 2 * kept


ANSWER = [30, 31, 32, 33, 34, 35, 36, 37, 38, 39]


def learnt(answer: list[int], wanted: Speculating | None = None) -> tuple[Slots, Any]:
    """A proposer that has seen an answer end in slot 0."""
    slots = Slots(4, 64, 16, 320)
    wanted = wanted or Speculating(("suffix",), shortest=2)
    proposer = make_proposer(wanted, slots, None)
    place(slots, proposer, 0, [5, 6, 7, *answer], prompt_len=3)
    leave(slots, proposer, 0)
    return slots, proposer


def place(slots: Slots, proposer: Any, slot: int, ids: list[int], prompt_len: int = 1) -> None:
    apply(
        slots,
        proposer,
        plan(Row(slot, 0, 1, blocks=[0]), new=(New(slot, ids, prompt_len=prompt_len),)),
    )


def leave(slots: Slots, proposer: Any, *freed: int) -> None:
    apply(slots, proposer, plan(freed=freed))


def apply(slots: Slots, proposer: Any, given: StepPlan) -> None:
    proposer.apply(given)
    slots.apply(given)


def guess(proposer: Any, slot: int, most: int = 5) -> list[int]:
    counts, ids = proposer.propose(int32([slot]), int32([most]))
    return ids[0, : counts[0]].tolist()


def test_an_ended_answer_is_guessed_in_another_request():
    slots, proposer = learnt(ANSWER)
    place(slots, proposer, 1, [1, 2, 33, 34, 35])
    assert guess(proposer, 1) == [36, 37, 38]  # as many as were matched
    place(slots, proposer, 2, [1, 2, 34, 35])  # too few to trust another's text
    assert guess(proposer, 2) == []
    place(slots, proposer, 3, [1, 5, 6, 7])  # a prompt is no answer
    assert guess(proposer, 3) == []
    place(slots, proposer, 3, [1, *ANSWER[:8]])  # nothing is guessed beyond an answer's end
    assert guess(proposer, 3) == [38, 39]


def test_short_answers_say_nothing_and_the_request_in_the_slot_is_forgotten():
    slots, proposer = learnt(ANSWER[:7])
    place(slots, proposer, 1, [1, 2, 31, 32, 33])
    assert guess(proposer, 1) == []


def test_the_longer_match_counts_and_the_requests_own_of_equal_ones():
    slots, proposer = learnt(ANSWER)
    place(slots, proposer, 1, [33, 34, 35, 77, 78, 79, 33, 34, 35])
    assert guess(proposer, 1) == [77, 78, 79]
    place(slots, proposer, 2, [33, 34, 35, 77, 78, 79, 32, 33, 34, 35])
    assert guess(proposer, 2) == [36, 37, 38, 39]
    place(slots, proposer, 3, [31, 32, 33, 34, 35, 77, 78, 31, 32, 33, 34, 35])
    assert guess(proposer, 3) == [77, 78, 31, 32, 33]


def test_of_two_answers_the_later_counts():
    slots, proposer = learnt(ANSWER)
    place(slots, proposer, 1, [1, *ANSWER[:6], *[90] * 9])
    leave(slots, proposer, 1)
    place(slots, proposer, 2, [1, 2, 33, 34, 35])
    assert guess(proposer, 2) == [90, 90, 90]


def test_where_an_answer_ended_the_requests_own_text_is_asked():
    slots, proposer = learnt(ANSWER)
    place(slots, proposer, 1, [*ANSWER[-2:], 71, 72, 5, *ANSWER[-3:]])
    assert guess(proposer, 1) == [71, 72]


class Scripted(Silent):
    def __init__(self, rows: dict[int, list[int]]) -> None:
        self.rows, self.applied, self.asked = rows, 0, []

    def apply(self, plan: StepPlan) -> None:
        self.applied += 1

    def propose(self, slots: Int32, most: Int32) -> tuple[Int32, Int32]:
        self.asked += slots.tolist()
        counts = int32([min(len(self.rows.get(s, [])), m) for s, m in zip(slots, most)])
        ids = np.zeros((len(slots), int(most.max())), dtype=np.int32)
        for row, slot in enumerate(slots.tolist()):
            ids[row, : counts[row]] = self.rows.get(slot, [])[: counts[row]]
        return counts, ids


def test_the_second_is_asked_where_the_first_has_nothing():
    first, second = Scripted({1: [11]}), Scripted({0: [20, 21, 22], 1: [23, 24, 25]})
    both = FirstOf(first, second)
    counts, ids = both.propose(int32([0, 1, 2]), int32([2, 4, 3]))
    assert counts.tolist() == [2, 1, 0]
    assert ids[0, :2].tolist() == [20, 21] and ids[1, 0] == 11
    assert second.asked == [0, 2]
    both.propose(int32([1]), int32([1]))
    assert second.asked == [0, 2]
    both.apply(plan(freed=()))
    assert first.applied == second.applied == 1


def test_the_proposer_is_the_one_asked_for():
    slots, drafts = Slots(1, 16, 16, 320), Scripted({})
    ngram, suffix = Speculating(("ngram",)), Speculating(("suffix",))
    assert type(make_proposer(ngram, slots, None)) is NgramProposer
    assert type(make_proposer(suffix, slots, None)) is SuffixProposer
    assert make_proposer(Speculating(("draft_layers",)), slots, drafts) is drafts
    assert type(make_proposer(Speculating(("suffix", "draft_model")), slots, drafts)) is FirstOf
