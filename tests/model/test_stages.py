"""Layers are divided among pipeline stages by bytes, and the stages, run one after the other, are
the whole model."""

from __future__ import annotations

import random
from itertools import combinations, pairwise

import pytest

from octavo.model.stages import Stage, all_layers, divide, layer_ranges
from octavo.types import ConfigError


def by_hand(sizes: list[int], first: int, last: int, stages: int) -> tuple[int, int]:
    """The least (largest stage, sum of squares) over all divisions."""
    found = []
    for cuts in combinations(range(1, len(sizes)), stages - 1):
        bounds = [0, *cuts, len(sizes)]
        taken = [sum(sizes[a:b]) for a, b in pairwise(bounds)]
        taken[0] += first
        taken[-1] += last
        found.append((max(taken), sum(size**2 for size in taken)))
    return min(found)


def test_layer_ranges_are_the_best_of_all_divisions():
    draw = random.Random(3)
    for _ in range(300):
        sizes = [draw.choice((0, 1, 5, draw.randrange(50))) for _ in range(draw.randint(1, 9))]
        first, last = draw.randrange(60), draw.randrange(60)
        for stages in range(1, len(sizes) + 1):
            ranges = layer_ranges(sizes, first, last, stages)
            assert ranges[0][0] == 0 and ranges[-1][1] == len(sizes) and len(ranges) == stages
            assert all(low < high for low, high in ranges)
            assert all(a[1] == b[0] for a, b in pairwise(ranges))
            taken = [sum(sizes[low:high]) for low, high in ranges]
            taken[0] += first
            taken[-1] += last
            expected = by_hand(sizes, first, last, stages)
            assert (max(taken), sum(size**2 for size in taken)) == expected


def test_even_layers_are_divided_evenly_and_both_ends_weigh():
    assert layer_ranges([7] * 8, 0, 0, 3) in ([(0, 3), (3, 6), (6, 8)], [(0, 2), (2, 5), (5, 8)])
    # A 70B of 80 layers in BF16: embedding and head are 2.1 GB, more than one layer.
    found = layer_ranges([1_711_000_000] * 80, 2_101_000_000, 2_101_000_000, 4)
    assert [end - first for first, end in found] == [19, 21, 21, 19]
    # A small model with a large vocabulary: the ends take several layers' worth.
    found = layer_ranges([10] * 12, 30, 30, 3)
    assert [end - first for first, end in found] == [3, 6, 3]


def test_more_stages_than_layers_are_refused_with_both_numbers():
    with pytest.raises(ConfigError, match=r"size 4: the model has 3 layers.*use 1 to 3"):
        layer_ranges([1, 1, 1], 0, 0, 4)


def test_a_stage_knows_what_it_has_besides_its_layers():
    first, middle, last = divide([5, 5, 5, 5], 4, 4, 3)
    assert first == Stage(0, 3, 0, 1) and middle == Stage(1, 3, 1, 3) and last.num_layers == 1
    assert [stage.is_first for stage in (first, middle, last)] == [True, False, False]
    assert [stage.is_last for stage in (first, middle, last)] == [False, False, True]
    assert all_layers(4).is_first and all_layers(4).is_last and all_layers(4).num_layers == 4
