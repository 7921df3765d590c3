"""The predicted wait for a place, against simulated queues."""

from __future__ import annotations

import random

import pytest

from octavo.engine.forecast import (
    MARGIN,
    MOST_LENGTHS,
    PRIOR_TOKENS,
    SPREAD,
    STEPS_TO_BEGIN,
    PlaceForecast,
)


def forecast(lengths=(), step=0.02, by_itself=True):
    made = PlaceForecast()
    made._latest.clear()  # of what is taken to be so before anything has ended
    made._sorted.clear()
    made.on_step(step)
    for length in lengths:
        made.on_end(length, by_itself)
    return made


def steps(count, mean, each=0.02):
    """Of ``count`` further tokens, where a whole output is ``mean`` long."""
    return pytest.approx(each * (MARGIN * count + SPREAD * mean + STEPS_TO_BEGIN), rel=0.01)


def test_places_free_up_when_outputs_of_the_usual_length_end():
    waits = forecast([100] * 20).waits([(40, 1000), (90, 1000), (10, 1000)])
    assert waits.of(-1) == 0.0
    assert waits.of(0) == steps(10, 100)
    assert waits.of(2) == steps(90, 100)
    assert waits.of(3) == steps(110, 100), "who waits for one that waited"


def test_what_has_come_far_is_compared_with_those_that_came_as_far():
    lengths = [10] * 90 + [500] * 10
    assert forecast(lengths).waits([(50, 1000)]).of(0) == steps(450, 59)
    assert forecast(lengths).waits([(5, 1000)]).of(0) == steps(0.9 * 5 + 0.1 * 495, 59)
    assert forecast(lengths).waits([(600, 5000)]).of(0) == steps(600, 59)


def test_outputs_that_were_cut_tell_only_that_they_were_not_shorter():
    cut = forecast([20] * 50 + [60] * 50, by_itself=False)
    assert cut.waits([(10, 55)]).of(0) == steps(45, 55)
    some = forecast([20] * 50, by_itself=False)
    for _ in range(50):
        some.on_end(40, True)
    assert some.waits([(30, 500)]).of(0) == steps(10, 40)
    assert some.waits([(0, 500)]).of(0) == steps(40, 40), "those cut at 20 would have had 40"


def test_no_more_than_max_tokens_is_expected():
    assert forecast([500] * 9).waits([(3, 8)]).of(0) == steps(5, 8)
    fresh = PlaceForecast()
    fresh.on_step(0.02)
    assert fresh.waits([(3, 8)]).of(0) == steps(5, 8)
    assert fresh.waits([(0, 10_000)]).of(0) == steps(PRIOR_TOKENS, PRIOR_TOKENS)


def test_old_lengths_are_forgotten():
    made = forecast([1000] * 50 + [10] * MOST_LENGTHS)
    assert made.waits([(0, 10_000)]).of(0) == steps(10, 10)
    assert len(made._sorted) == len(made._latest) == MOST_LENGTHS


def test_steps_are_those_of_late():
    made = forecast([100], step=0.01)
    for _ in range(200):
        made.on_step(0.05)
    assert made.waits([(0, 1000)]).of(0) == steps(100, 100, each=0.05)


@pytest.mark.parametrize("allowed", ["much", "just"])
@pytest.mark.parametrize("shape", ["equal", "uniform", "geometric", "few long ones"])
def test_those_who_are_let_in_seldom_wait_longer_than_predicted(shape, allowed):
    """Eight places, arrivals ten times too fast, a step each turn of the loop; at most 25 steps of
    waiting are accepted. ``max_tokens`` tells nothing of the length, or all."""
    draw = random.Random(3)
    length = {
        "equal": lambda: 60,
        "uniform": lambda: draw.randint(20, 100),
        "geometric": lambda: 1 + int(draw.expovariate(1 / 60)),
        "few long ones": lambda: 400 if draw.random() < 0.1 else draw.randint(5, 30),
    }[shape]
    made = PlaceForecast()
    made.on_step(1.0)
    running: list[list[int]] = []  # [tokens so far, tokens in all, max_tokens]
    queue: list[int] = []  # times of arrival
    waited = []
    for now in range(20_000):
        for sequence in running:
            sequence[0] += 1
            if sequence[0] == sequence[1]:
                made.on_end(sequence[1], sequence[1] < sequence[2])
        running = [sequence for sequence in running if sequence[0] < sequence[1]]
        while queue and len(running) < 8:
            waited.append(now - queue.pop(0))
            output = length()
            running.append([0, output, output if allowed == "just" else 10**6])
        if draw.random() < 0.7:
            position = len(queue) - (8 - len(running))
            waits = made.waits((tokens, most) for tokens, _, most in running)
            if waits.of(position) <= 25:
                queue.append(now)
    assert len(waited) > 1000
    late = sum(wait > 25 for wait in waited) / len(waited)
    print(f"{shape} {allowed}: {len(waited)} served, {late:.1%} late")
    assert late < 0.05
