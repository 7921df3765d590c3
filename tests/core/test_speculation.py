"""How many guesses each row may bring, and what is learnt of those it brought."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.core import speculation as core
from octavo.core.speculation import LONGEST_REST, PLAIN_STEPS, SHORTEST_REST, TRIED, Speculation
from octavo.engine.verify_cost import VerifyCosts
from tests.core.harness import Harness


class Linear:
    """A step takes a second, each guess ``each`` seconds more."""

    def __init__(self, each: float = 0.0) -> None:
        self.each = each

    def seconds(self, num_rows, num_guesses):
        return 1.0 + self.each * num_guesses


def int32(*values):
    return np.array(values, dtype=np.int32)


def request(**params):
    return Harness().request([5, 6], **params)


def entered(most=4, num_rows=3, cost=None, at_once=0) -> Speculation:
    speculation = Speculation(most, 8, cost or Linear(), at_once)
    for slot in range(num_rows):
        speculation.enter(slot, request())
    return speculation


def choose(speculation, room=(99, 99, 99), budget=99) -> list[int]:
    chosen = speculation.choose(np.arange(len(room)), int32(*room), budget)
    assert chosen.dtype == np.int32
    return chosen.tolist()


def learn(speculation, slot, right, times=30, num=3) -> None:
    """A slot brings ``num`` guesses, all ``right`` or all wrong."""
    for _ in range(times):
        slots = np.array([slot])
        speculation.observe(slots, int32(num), int32(num), int32(num if right else 0))


def test_free_guesses_are_made_as_far_as_there_is_room():
    assert choose(entered()) == [4, 4, 4]
    assert choose(entered(), room=(0, 2, 9)) == [0, 2, 4]
    assert choose(entered(), room=(0, 0, 0)) == [0, 0, 0]


def test_no_more_than_the_budget_the_first_guesses_of_all_rows_before_second_ones():
    assert choose(entered(), budget=5) == [2, 2, 1]
    assert choose(entered(), budget=0) == [0, 0, 0]
    assert choose(entered(), budget=-3) == [0, 0, 0]


def test_beside_prompts_there_are_none():
    assert choose(entered(), room=(9, -1, 9)) == [0, 0, 0]
    assert choose(entered(), room=()) == []


def test_nothing_is_guessed_before_a_step_was_measured():
    costs = VerifyCosts()
    assert choose(entered(cost=costs)) == [0, 0, 0]
    costs.observe(3, 0, 3, 0.1)
    assert choose(entered(cost=costs)) == [4, 4, 4]  # free until measured


def test_each_row_has_as_many_as_its_own_chance_pays_for():
    speculation = entered(cost=Linear(0.05))
    learn(speculation, 0, right=True)
    learn(speculation, 2, right=False)
    first, second, third = choose(speculation)
    assert first == 4 and 0 < second < 4 and third == 0
    assert speculation.length == pytest.approx((first + second + third) / 3)


@settings(max_examples=60)
@given(
    st.lists(st.tuples(st.integers(0, 3), st.floats(0, 0.98)), min_size=1, max_size=3),
    st.floats(0, 0.6),
    st.integers(1, 7),
)
def test_the_choice_has_the_most_expected_tokens_a_second(rows, each, budget):
    speculation = entered(3, len(rows), Linear(each))
    for slot, (_, chance) in enumerate(rows):
        speculation._right[slot] = chance * speculation._tested[slot]
    room = [room for room, _ in rows]

    def rate(counts):
        gained = sum(c**n for count, (_, c) in zip(counts, rows) for n in range(1, count + 1))
        return (len(rows) + gained) / (1 + each * sum(counts))

    allowed = itertools.product(*(range(most + 1) for most in room))
    best = max(rate(counts) for counts in allowed if sum(counts) <= budget)
    found = choose(speculation, room, budget)
    assert all(count <= most for count, most in zip(found, room)) and sum(found) <= budget
    # Guesses that promise less than two per cent are not made.
    assert rate(found) >= best / 1.0201


def test_a_guess_that_promises_next_to_nothing_is_not_made():
    speculation = entered(1, 1, Linear(0.49))
    assert choose(speculation, room=(9,)) == [0]  # 1.5 tokens for 1.49 seconds
    assert choose(entered(1, 1, Linear(0.4)), room=(9,)) == [1]


@pytest.fixture
def free_tries(monkeypatch):
    """Whatever they cost."""
    monkeypatch.setattr(core, "TRIES_SHARE", 1e3)
    monkeypatch.setattr(core, "MOST_SAVED", 1e6)


def test_tries_take_a_small_share_of_the_time():
    speculation = entered(4, 1, Linear(0.6))
    speculation._right[0] = 0.0
    spent = 0.0
    for _ in range(4000):
        (count,) = choose(speculation, room=(9,))
        if count:
            spent += 0.6 * count
            speculation.observe(np.array([0]), int32(count), int32(count), int32(0))
    assert 0 < spent <= core.FIRST_SAVED + 4000 * core.TRIES_SHARE


def test_rows_rest_and_try_again_after_ever_longer_pauses(free_tries):
    speculation = entered(4, 1, Linear(10.0))
    tries = []
    for step in range(1200):
        (count,) = choose(speculation, room=(9,))
        if count:
            assert count == TRIED
            tries.append(step)
            speculation.observe(np.array([0]), int32(count), int32(count), int32(0))
    gaps = np.diff([0, *tries])
    expected = [min(SHORTEST_REST << number, LONGEST_REST) for number in range(len(gaps))]
    assert len(gaps) > 8 and abs(gaps - expected - 1).max() <= 2  # now and then a plain step


def test_one_row_tries_in_a_step_and_what_it_tries_may_end_its_rest(free_tries):
    cost = Linear(10.0)
    speculation = entered(4, 3, cost)
    for _ in range(100):
        counts = choose(speculation)
        assert sum(count > 0 for count in counts) <= 1
        tried = np.flatnonzero(counts)
        if len(tried):
            speculation.observe(tried, int32(TRIED), int32(TRIED), int32(0))
    cost.each = 0.1
    for _ in range(LONGEST_REST + 3):
        if choose(speculation)[1]:
            break
    learn(speculation, 1, right=True)
    assert choose(speculation)[1] == 4 and choose(speculation)[1] == 4


def test_now_and_then_a_step_has_none_so_that_its_time_is_known():
    speculation = entered()
    counts = [sum(choose(speculation)) for _ in range(3 * PLAIN_STEPS + 3)]
    assert [step for step, count in enumerate(counts) if not count] == [
        PLAIN_STEPS,
        2 * PLAIN_STEPS + 1,
        3 * PLAIN_STEPS + 2,
    ]


def test_rows_that_rarely_bring_what_they_may_cost_little():
    """n-grams match now and then: what they may bring and do not costs nothing."""
    speculation = entered(4, 1, Linear(0.3))
    learn(speculation, 0, right=True, times=5, num=4)
    for _ in range(20):
        speculation.observe(np.array([0]), int32(4), int32(0), int32(0))
    assert choose(speculation, room=(9,))[0] in (0, 4)
    assert speculation._share[0] == 0.05
    learn(speculation, 0, right=True, times=9, num=4)
    assert choose(speculation, room=(9,)) == [4]


def test_counters_by_place_and_of_the_request():
    speculation = entered(4, 4)
    slots = np.arange(4)
    speculation.observe(slots, int32(4, 3, 0, 2), int32(4, 2, 0, 0), int32(4, 1, 0, 0))
    speculation.observe(slots[:1], int32(2), int32(1), int32(0))
    counters = speculation.counters
    assert (counters.num_drafts, counters.num_draft_tokens, counters.num_accepted) == (3, 7, 5)
    assert counters.drafted_at == [3, 2, 1, 1]
    assert counters.accepted_at == [2, 1, 1, 1]
    owner = request()
    speculation.leave(0, owner)
    assert (owner.num_drafts, owner.num_accepted_drafts) == (5, 4)
    speculation.enter(0, owner)  # it comes back after preemption
    speculation.observe(slots[:1], int32(3), int32(3), int32(1))
    speculation.leave(0, owner)
    speculation.leave(0, owner)
    assert (owner.num_drafts, owner.num_accepted_drafts) == (8, 5)


def test_a_new_request_begins_with_what_all_have_shown():
    speculation = entered(4, 3, Linear(0.05))
    assert choose(speculation)[2] > 0
    learn(speculation, 0, right=False, times=60)
    learn(speculation, 1, right=False, times=60)
    speculation.enter(2, request())
    assert choose(speculation) == [0, 0, 0]
    learn(speculation, 0, right=True, times=60)
    speculation.enter(2, request())
    assert choose(speculation, room=(9, 9, 9))[2] > 2


# ---- rows that are drawn at once, on a GPU ----


def test_drawn_at_once_all_rows_have_the_guesses_of_one():
    speculation = entered(4, 3, Linear(0.05), at_once=99)
    learn(speculation, 0, right=True)
    learn(speculation, 2, right=False)
    first, second, third = choose(speculation)
    assert 0 < first == second == third
    assert choose(speculation, room=(9, 1, 0)) == [first, 1, 0]


def test_drawn_at_once_no_more_than_fit_together():
    assert choose(entered(at_once=99)) == [4, 4, 4]
    assert choose(entered(at_once=14)) == [3, 3, 3]
    assert choose(entered(at_once=99), budget=8) == [2, 2, 2]
    assert choose(entered(at_once=5)) == [0, 0, 0]


@pytest.mark.parametrize(
    ("params", "counts"),
    [
        ({"temperature": 0.8, "top_p": 0.9}, [4, 4, 4]),
        ({"frequency_penalty": 0.1}, [4, 0, 4]),
        ({"repetition_penalty": 1.1}, [4, 0, 4]),
        ({"logprobs": 0}, [0, 0, 0]),
        ({"logit_bias": {5: 1.0}}, [0, 0, 0]),
        ({"allowed_token_ids": [5]}, [0, 0, 0]),
        ({"min_tokens": 3}, [0, 0, 0]),
    ],
    ids=str,
)
def test_drawn_at_once_some_requests_have_none_and_some_let_none_beside_them(params, counts):
    speculation = entered(at_once=99)
    speculation.enter(1, request(**params))
    assert choose(speculation) == counts
    each = entered()
    each.enter(1, request(**params))
    assert choose(each) == [4, 4, 4]


def test_drawn_at_once_all_rows_rest_and_try_together(free_tries):
    speculation = entered(4, 3, Linear(10.0), at_once=99)
    tries = []
    for step in range(400):
        counts = choose(speculation)
        if any(counts):
            assert counts == [TRIED] * 3
            tries.append(step)
            three = int32(*counts)
            speculation.observe(np.arange(3), three, three, int32(0, 0, 0))
    gaps = np.diff(tries)
    assert len(gaps) > 4 and (gaps <= PLAIN_STEPS + 2).all() and gaps[0] < gaps[-1]


# ---- measured costs ----


def test_times_between_those_measured_are_interpolated_and_never_fall():
    costs = VerifyCosts()
    assert costs.seconds(4, np.array([0.0, 3.0])) is None
    costs.observe(4, 0, 4, 1.0)
    costs.observe(8, 0, 8, 1.4)
    assert costs.seconds(4, np.array([0.0, 3.0])).tolist() == [1.0, 1.0]
    assert costs.seconds(5, np.array([0.0])) is None  # that many rows were never seen
    costs.observe(4, 4, 5, 2.0)
    costs.observe(4, 8, 5, 3.0)
    costs.observe(4, 12, 5, 2.5)
    times = costs.seconds(4, np.array([0.0, 1.0, 4.0, 6.0, 8.0, 12.0, 40.0]))
    assert times.tolist() == [1.0, 2.0, 2.0, 2.5, 3.0, 3.0, 3.0]


def test_guesses_never_take_less_than_none():
    costs = VerifyCosts()
    costs.observe(2, 0, 2, 1.0)
    costs.observe(2, 2, 3, 0.5)
    assert costs.seconds(2, np.array([0.0, 2.0])).tolist() == [1.0, 1.0]


def test_the_first_steps_of_a_size_may_take_longer_and_later_ones_count_little():
    costs = VerifyCosts()

    def after(*seconds):
        for each in seconds:
            costs.observe(3, 0, 3, each)
        return costs.seconds(3, np.array([0.0])).item()

    assert after(9.0) == 9.0
    assert after(1.0, 5.0) == 1.0  # of three the shortest
    assert after(1.5) == 3.25  # then their median
    assert after(50.0) == 5.0
    assert after(1.2, 1.3, 1.1, 1.2) == 1.3  # of the last nine


def test_large_sizes_share_an_entry():
    costs = VerifyCosts()
    costs.observe(33, 0, 33, 1.0)
    assert costs.seconds(36, np.array([0.0])).tolist() == [1.0]
    assert costs.seconds(37, np.array([0.0])) is None
    assert costs.seconds(32, np.array([0.0])) is None


def test_saved_seconds_are_against_steps_that_draw_as_many_tokens():
    costs = VerifyCosts()
    costs.observe(2, 4, 6, 9.0)  # nothing to compare it with
    assert costs.saved_seconds == 0
    costs.observe(2, 0, 2, 1.0)
    costs.observe(2, 4, 6, 2.0)  # three steps' tokens in the time of two
    assert costs.saved_seconds == pytest.approx(1.0)
    costs.observe(2, 4, 2, 2.5)  # all wrong
    assert costs.saved_seconds == pytest.approx(-0.5)
