"""What followed the last tokens where they stood before, against a slow reader."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from octavo.worker.slots import Slots
from octavo.worker.speculative.ngram import NgramProposer, continuation
from tests.worker.plans import New, Row, int32, plan

texts = st.lists(st.integers(0, 2), max_size=24)


def slow(
    text: list[int], pattern: list[int], shortest: int, longest: int, most: int
) -> tuple[list[int], int]:
    """By the definition: the longest suffix of ``pattern``, and of its places the last."""
    for size in range(min(longest, len(pattern)), max(shortest, 1) - 1, -1):
        for end in range(len(text) - 1, size - 1, -1):
            if text[end - size : end] == pattern[-size:]:
                rest = text[end:]
                return [rest[i % len(rest)] for i in range(most)], size
    return [], 0


@given(texts, texts, st.integers(1, 5), st.integers(0, 6), st.integers(0, 9))
def test_continuation_is_what_a_slow_reader_finds(text, pattern, shortest, more, most):
    longest = shortest + more
    for of in (text, pattern):
        found, matched = continuation(int32(text), int32(of), shortest, longest, most)
        assert (found.tolist(), matched) == slow(text, of, shortest, longest, most)


@given(st.lists(st.integers(0, 50), min_size=1, max_size=6, unique=True), st.integers(0, 12))
def test_a_text_of_a_period_is_continued_with_it(period, more):
    length = 2 * len(period) + more
    text = [period[i % len(period)] for i in range(length + 16)]
    found, matched = continuation(int32(text[:length]), int32(text[:length]), 1, 64, 16)
    assert found.tolist() == text[length:]
    assert matched == length - len(period)


def test_a_match_may_begin_the_text_but_not_end_it():
    text = int32([7, 8, 9, 7, 8])
    assert continuation(text, text, 2, 16, 2)[0].tolist() == [9, 7]
    assert continuation(text, text, 3, 16, 2)[1] == 0
    assert continuation(int32([7, 8]), int32([7, 8]), 1, 16, 2)[1] == 0
    assert continuation(int32([]), int32([7]), 1, 16, 2)[1] == 0
    assert continuation(int32([7]), int32([]), 1, 16, 2)[1] == 0


def test_of_equally_long_matches_the_latest_counts_and_a_longer_one_before_it():
    text = int32([1, 2, 5, 1, 2, 6, 3, 2, 7, 1, 2])
    assert continuation(text, text, 2, 16, 1) == (int32([6]), 2)
    assert continuation(text, text, 1, 1, 1) == (int32([7]), 1)


def placed(*texts: list[int]) -> Slots:
    """A slot with each of these."""
    slots = Slots(8, 64, 16, 320)
    new = tuple(New(slot, text) for slot, text in enumerate(texts))
    rows = (Row(slot, 0, 1, blocks=[4 * slot]) for slot in range(len(texts)))
    slots.apply(plan(*rows, new=new))
    return slots


def test_as_many_are_guessed_as_were_matched_and_no_more_than_are_wanted():
    slots = placed([9, 8, 7, 1, 2, 9, 8, 7], [1, 2, 3, 4], [5] * 10, [6, 7, 8, 6, 7])
    slots.history_host[:, 10:] = 8  # what guesses of earlier steps have left behind
    proposer = NgramProposer(slots, 2, 16)
    counts, ids = proposer.propose(int32([2, 0, 1, 3]), int32([5, 6, 6, 1]))
    assert counts.tolist() == [5, 3, 0, 1] and counts.dtype == ids.dtype == np.int32
    assert ids.shape == (4, 6)
    assert ids[0, :5].tolist() == [5] * 5
    assert ids[1, :3].tolist() == [1, 2, 9]
    assert ids[3, 0] == 8
    assert NgramProposer(slots, 2, 2).propose(int32([2]), int32([5]))[0].tolist() == [2]
    assert NgramProposer(slots, 4, 16).propose(int32([0]), int32([5]))[0].tolist() == [0]
