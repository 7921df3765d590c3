"""Which heads, columns and ids a rank has."""

from __future__ import annotations

import pytest

from octavo.model.shard import Cut, Shard
from octavo.types import ConfigError


def heads(num_heads: int, num_kv_heads: int, size: int) -> list[tuple[int, int, int]]:
    """Of each rank: query heads, heads of keys, ranks that have the same head of keys."""
    found = [Shard(rank, size).heads(num_heads, num_kv_heads) for rank in range(size)]
    ends = [0, *(one.queries[1] for one in found)]
    assert [one.queries[0] for one in found] == ends[:-1] and ends[-1] == num_heads
    group = num_heads // num_kv_heads
    for one in found:  # a query head is with its head of keys
        first, last = one.queries[0] // group, (one.queries[1] - 1) // group
        assert one.keys[0] <= first and last < one.keys[1]
        assert one.num_queries % one.num_keys == 0
    return [(one.num_queries, one.num_keys, one.copies) for one in found]


def test_heads_go_out_even_uneven_and_replicated() -> None:
    assert heads(32, 8, 4) == [(8, 2, 1)] * 4
    assert heads(9, 3, 2) == [(6, 2, 1), (3, 1, 1)]
    assert heads(9, 3, 3) == [(3, 1, 1)] * 3
    assert heads(32, 8, 16) == [(2, 1, 2)] * 16
    assert heads(6, 2, 4) == [(2, 1, 2), (1, 1, 2)] * 2
    assert heads(8, 1, 3) == [(3, 1, 3), (3, 1, 3), (2, 1, 3)]
    assert heads(9, 3, 4) == [(2, 1, 2), (1, 1, 2), (3, 1, 1), (3, 1, 1)]


@pytest.mark.parametrize("size", range(1, 13))
def test_any_size_up_to_the_heads_divides_them(size: int) -> None:
    heads(12, 3, size)
    heads(12, 12, size)
    heads(12, 1, size)


def test_more_ranks_than_heads_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"13: the model has 12 attention heads.*use 1 to 12"):
        Shard(0, 13).heads(12, 3)


def test_inner_sizes_keep_tiles_and_groups_whole_where_that_is_nearly_even() -> None:
    def ends(total: int, size: int) -> list[int]:
        return [Shard(rank, size).inner(total, "it")[1] for rank in range(size)]

    assert ends(14336, 2) == [7168, 14336]
    assert ends(1536, 3) == [512, 1024, 1536]
    assert ends(11008, 4) == [2816, 5632, 8320, 11008]  # 86 tiles of 128
    assert ends(160, 2) == [80, 160]  # 5 groups of 32 would give 96 and 64
    assert ends(7, 3) == [3, 5, 7]
    with pytest.raises(ConfigError, match="it is 2, and a rank needs one of it at least"):
        ends(2, 3)


def test_what_is_left_of_a_tensor() -> None:
    assert Cut(((0, 4), (10, 12))).shape((20, 8)) == (6, 8)
    assert Cut(columns=(2, 5)).shape((20, 8)) == (20, 3)
    assert Cut(((3, 9),)).shape((20,)) == (6,)
