"""Plans of packed weights: the shipped table and the rule of thumb."""

from __future__ import annotations

from functools import partial

import pytest

from octavo.ops.triton import packed_plans
from octavo.ops.triton.packed import Layout
from octavo.ops.triton.packed_plans import (
    BUCKETS,
    EXPAND,
    ROUNDED,
    bucket_of,
    choose,
    rounded_plan,
    rule_of_thumb,
)


def test_the_shipped_table_is_used_on_hopper_alone():
    table = packed_plans.shipped_table()
    kinds = {"4-bit/128": (4, 64, 128), "float8": (0, 128, 0)}
    assert {kind for kind, _, _ in table} == {*kinds, ROUNDED}
    for (kind, shape, bucket), plan in table.items():
        if kind == ROUNDED:
            own = partial(rounded_plan, Layout(0, shape.k, 128), shape.n, shape.epilogue, bucket)
            assert own(hopper=True) == plan and own(hopper=False, table={}) == own(hopper=False)
            continue
        bits, width, group = kinds[kind]
        layout = Layout(bits, shape.k, width, group, shape.k // group if group else 1)
        assert choose(layout, shape.n, shape.epilogue, bucket, hopper=True) == plan
        other = choose(layout, shape.n, shape.epilogue, bucket, hopper=False)
        assert other == rule_of_thumb(layout, shape.n, shape.epilogue, bucket, hopper=False)


@pytest.mark.parametrize("bits", (0, 2, 3, 4, 8))
@pytest.mark.parametrize("inputs", (64, 576, 4096, 28672))
def test_the_rule_of_thumb_has_a_plan_for_any_shape(bits, inputs):
    for n in (1, 75, 4096, 151936):
        for bucket in BUCKETS:
            plan = rule_of_thumb(Layout(bits, inputs, 32), n, "none", bucket, hopper=True)
            assert (plan.kind == "gemv") == (bucket == 1)
            if plan != EXPAND:
                sizes = (plan.block_n, plan.block_k, plan.num_warps)
                assert all(size > 0 and size & (size - 1) == 0 for size in sizes)


def test_rows_are_padded_to_the_next_bucket():
    found = [bucket_of(rows) for rows in (1, 2, 17, 64, 65, 256, 257)]
    assert found == [1, 16, 32, 64, 128, 256, None]
