"""The predicted wait for a place, against simulated queues."""

from __future__ import annotations

import random

import pytest

from octavo.engine.forecast import MOST_LENGTHS, PRIOR_TOKENS, PlaceForecast


def forecast(lengths=(), step=0.02):
    made = PlaceForecast()
    made.on_step(step)
    for length in lengths:
        made.on_end(length)
    return made


def test_places_free_up_when_outputs_of_the_usual_length_end():
    waits = forecast([100] * 20).waits([(40, 1000), (90, 1000), (10, 1000)])
    assert waits.of(-1) == 0.0
    assert waits.of(0) == pytest.approx(0.02 * 11)
    assert waits.of(2) == pytest.approx(0.02 * 91)
    assert waits.of(3) == pytest.approx(0.02 * 11 + 2.0), "who waits for one that waited"


def test_what_has_come_far_is_compared_with_those_that_came_as_far():
    lengths = [10] * 90 + [500] * 10
    waits = forecast(lengths).waits([(50, 1000)])
    assert waits.of(0) == pytest.approx(0.02 * 451)
    beyond = forecast(lengths).waits([(600, 5000)])
    assert beyond.of(0) == pytest.approx(0.02 * 601)


def test_no_more_than_max_tokens_is_expected():
    assert forecast([500] * 9).waits([(3, 8)]).of(0) == pytest.approx(0.02 * 6)
    assert forecast().waits([(3, 8)]).of(0) == pytest.approx(0.02 * 6)
    assert forecast().waits([(0, 10_000)]).of(0) == pytest.approx(0.02 * (PRIOR_TOKENS + 1))


def test_old_lengths_are_forgotten():
    made = forecast([1000] * 50 + [10] * MOST_LENGTHS)
    assert made.waits([(0, 10_000)]).of(0) == pytest.approx(0.02 * 11)
    assert len(made._sorted) == len(made._latest) == MOST_LENGTHS


def test_steps_are_those_of_late():
    made = forecast([100], step=0.01)
    for _ in range(200):
        made.on_step(0.05)
    assert made.waits([(0, 1000)]).of(0) == pytest.approx(0.05 * 101, rel=0.01)


@pytest.mark.parametrize("shape", ["equal", "uniform", "geometric"])
def test_those_who_are_let_in_seldom_wait_longer_than_predicted(shape):
    """Eight places, arrivals ten times too fast, a step each turn of the loop; at most 25 steps of
    waiting are accepted. ``max_tokens`` tells nothing."""
    draw = random.Random(3)
    length = {
        "equal": lambda: 60,
        "uniform": lambda: draw.randint(1, 120),
        "geometric": lambda: 1 + int(draw.expovariate(1 / 60)),
    }[shape]
    made = forecast(step=1.0)
    running: list[list[int]] = []  # [tokens so far, tokens in all]
    queue: list[int] = []  # times of arrival
    waited = []
    for now in range(20_000):
        for sequence in running:
            sequence[0] += 1
            if sequence[0] == sequence[1]:
                made.on_end(sequence[1])
        running = [sequence for sequence in running if sequence[0] < sequence[1]]
        while queue and len(running) < 8:
            waited.append(now - queue.pop(0))
            running.append([0, length()])
        if draw.random() < 10 * 8 / 60 / 2:
            position = len(queue) - (8 - len(running))
            waits = made.waits((tokens, 10**6) for tokens, _ in running)
            if waits.of(position) <= 25:
                queue.append(now)
    assert len(waited) > 1500
    late = sum(wait > 26 for wait in waited) / len(waited)
    assert late < 0.05
