"""Plans of the Triton linears: the shipped table and the rule of thumb. No Triton needed."""

from __future__ import annotations

import pytest

from octavo.ops.triton import plans
from octavo.ops.triton.plans import BUCKETS, CUBLAS, Plan, Shape, bucket_of, choose

SHAPES = [
    Shape(n * (2 if epilogue == "silu_mul" else 1), k, epilogue)
    for n in (1, 75, 576, 4096, 14336, 151936)
    for k in (8, 136, 576, 1536, 4096, 28672)
    for epilogue in ("none", "add", "silu_mul", "logits")
]


def assert_runs(plan: Plan, shape: Shape, bucket: int) -> None:
    """What the kernels ask of a plan."""
    if plan.kind == "cublas":
        return
    sizes = (plan.block_n, plan.block_k, plan.num_warps)
    assert all(size & (size - 1) == 0 and size > 0 for size in sizes)
    assert (plan.kind == "gemv") == (bucket == 1)
    if plan.kind == "gemv":
        assert plan.split_k == 1 and plan.block_n * plan.block_k <= 8192
        return
    assert plan.shared_memory(bucket) <= plans.SHARED_MEMORY
    assert plan.block_n >= (64 if plan.swap else 16) and plan.block_k >= 16
    assert plan.num_stages >= 1 and plan.split_k >= 1


def test_rows_are_padded_to_the_next_bucket():
    found = [bucket_of(rows) for rows in (0, 1, 2, 16, 17, 33, 64, 65, 8192)]
    assert found == [None, 1, 16, 16, 32, 64, 64, None, None]


def test_the_shipped_table_runs_and_is_used():
    table = plans.shipped_table()
    assert len(table) == 2 * 5 * len(BUCKETS)
    for (shape, bucket), plan in table.items():
        assert_runs(plan, shape, bucket)
        assert choose(shape, bucket, hopper=True) == plan


@pytest.mark.parametrize("bucket", BUCKETS)
def test_the_rule_of_thumb_has_a_plan_for_any_shape(bucket):
    for shape in SHAPES:
        assert_runs(choose(shape, bucket, hopper=True, table={}), shape, bucket)


@pytest.mark.parametrize("bucket", BUCKETS)
def test_all_candidates_run(bucket):
    for shape in SHAPES:
        found = list(plans.candidates(shape, bucket))
        assert found[0] == CUBLAS and len(set(found)) == len(found)
        for plan in found:
            assert_runs(plan, shape, bucket)


def test_other_devices_have_the_gemv_alone():
    shape = Shape(6144, 4096, "none")
    kinds = [choose(shape, bucket, hopper=False).kind for bucket in BUCKETS]
    assert kinds == ["gemv", "cublas", "cublas", "cublas"]


def test_columns_must_be_a_multiple_of_8():
    for hopper in (False, True):
        assert choose(Shape(64, 100, "none"), 1, hopper) == CUBLAS
    assert list(plans.candidates(Shape(64, 100, "none"), 16)) == [CUBLAS]


def test_few_tiles_are_split_and_many_are_not():
    split = {n: plans.rule_of_thumb(Shape(n, 4096, "add"), 16).split_k for n in (1024, 4096, 28672)}
    assert split == {1024: 4, 4096: 2, 28672: 1}


def test_what_tuning_writes_is_what_linears_read(tmp_path, monkeypatch):
    tune = pytest.importorskip("benchmarks.gpu.tune")
    monkeypatch.setattr(tune.torch.cuda, "get_device_name", lambda: "a GPU")
    shape, path = Shape(75, 136, "add"), tmp_path / "plans.json"
    split = Plan("skinny", 64, 128, num_warps=4, num_stages=4, split_k=2)
    for bucket, plan in ((1, CUBLAS), (16, CUBLAS), (16, split)):  # the last of equals stays
        row = {"n": 75, "k": 136, "epilogue": "add", "rows": bucket, "plan": tune.plain(plan)}
        tune.write(path, [row], tune.torch.bfloat16)
    assert plans.read_table(path) == {(shape, 1): CUBLAS, (shape, 16): split}
