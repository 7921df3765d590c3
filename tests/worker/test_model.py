"""The worker on model R: plans by hand against the oracle, which keeps no cache."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from octavo.config import (
    CacheConfig,
    EngineConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
)
from octavo.core.plan import StepPlan
from octavo.types import SamplingParams
from octavo.worker.executor import UniExecutor, start_executor
from tests.fixtures.oracle import Oracle
from tests.worker.plans import New, Row, plan

BLOCK = 16


@pytest.fixture(scope="module")
def oracle(model_r: Path) -> Oracle:
    return Oracle(model_r)


@pytest.fixture(scope="module")
def started(model_r: Path) -> Iterator[UniExecutor]:
    config = EngineConfig(
        model=ModelConfig(model=str(model_r), dtype="float32"),
        cache=CacheConfig(num_gpu_blocks_override=160),
        scheduler=SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=256),
        parallel=ParallelConfig(cpu_threads=1),
    )
    executor, info = start_executor(config, model_r, lambda *news: None)
    assert isinstance(executor, UniExecutor)
    assert (info.vocab_size, info.dtype, info.max_model_len) == (320, "float32", 2048)
    assert next(iter(info.startup_seconds)) == "import torch" and "warm-up" in info.startup_seconds
    yield executor
    executor.shutdown()


@pytest.fixture
def executor(started: UniExecutor) -> Iterator[UniExecutor]:
    yield started
    started.submit(plan(Row(7, 0, 1, blocks=[159]), new=(New(7, [0]),), freed=tuple(range(8))))
    started.collect()


def prompt(length: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, 320, length).tolist()


def run(executor: UniExecutor, *plans: StepPlan) -> list[list[int]]:
    """All plans are submitted before the first result is taken, as overlap does at most."""
    for item in plans:
        executor.submit(item)
    results = [executor.collect() for _ in plans]
    return [r.tokens[r.num_accepted > 0, 0].tolist() for r in results]


def blocks(first: int, tokens: int) -> list[int]:
    return list(range(first, first - (-tokens // BLOCK)))


@pytest.mark.parametrize("size", [1, 7, 64, 100])
def test_chunks_equal_the_oracle(executor: UniExecutor, oracle: Oracle, size: int) -> None:
    ids = prompt(100, seed=1)
    rows = []
    for start in range(0, 100, size):
        count = min(size, 100 - start)
        new_blocks = blocks(3, 128) if start == 0 else []
        rows.append(Row(2, start, count, draw=start + count == 100, blocks=new_blocks))
    rows += [Row(2, 100 + i, 1, draw=True) for i in range(7)]
    plans = [plan(row, new=(New(2, ids),) if i == 0 else ()) for i, row in enumerate(rows)]
    drawn = [tokens[0] for tokens in run(executor, *plans) if tokens]
    assert drawn == oracle.greedy(ids, 8)


def test_two_requests_in_one_batch_and_a_chunk_beside_them(
    executor: UniExecutor, oracle: Oracle
) -> None:
    one, two, late = prompt(20, 2), prompt(33, 3), prompt(50, 4)
    drawn = run(
        executor,
        plan(
            Row(0, 0, 20, True, blocks(0, 32)),
            Row(1, 0, 33, True, blocks(10, 48)),
            new=(New(0, one), New(1, two)),
        ),
        plan(
            Row(4, 0, 31, False, blocks(20, 64)),
            Row(1, 33, 1, True),
            Row(0, 20, 1, True),
            new=(New(4, late),),
        ),
        plan(Row(0, 21, 1, True), Row(4, 31, 19, True), Row(1, 34, 1, True)),
        plan(Row(4, 50, 1, True), freed=(0,)),
    )
    first, second, third = (oracle.greedy(ids, 3) for ids in (one, two, late))
    assert drawn == [
        [first[0], second[0]],
        [second[1], first[1]],
        [first[2], third[0], second[2]],
        [third[1]],
    ]


def test_a_slot_and_its_blocks_are_used_again_in_the_next_plan(
    executor: UniExecutor, oracle: Oracle
) -> None:
    one, two = prompt(40, 5), prompt(17, 6)
    drawn = run(
        executor,
        plan(Row(3, 0, 40, True, blocks(30, 48)), new=(New(3, one),)),
        plan(Row(3, 0, 17, True, blocks(30, 32)), new=(New(3, two),), freed=(3,)),
        plan(Row(3, 17, 1, True)),
    )
    expected = oracle.greedy(two, 2)
    assert drawn == [oracle.greedy(one, 1), expected[:1], expected[1:]]


def test_forked_tables_share_full_blocks_and_copy_the_open_one(
    executor: UniExecutor, oracle: Oracle
) -> None:
    ids = prompt(40, 7)  # blocks 50, 51 full, 52 holds 8
    other = [*ids, *prompt(3, 8)]
    drawn = run(
        executor,
        plan(Row(0, 0, 40, True, blocks(50, 48)), new=(New(0, ids),)),
        plan(
            Row(0, 40, 1, True),
            Row(1, 40, 3, True, [50, 51, 60]),
            new=(New(1, other),),
            copies=((52, 60),),
        ),
        plan(Row(1, 43, 1, True), Row(0, 41, 1, True)),
    )
    mine, forked = oracle.greedy(ids, 3), oracle.greedy(other, 2)
    assert drawn == [[mine[0]], [mine[1], forked[0]], [forked[1], mine[2]]]


def test_seeded_draws_do_not_depend_on_chunks_or_company(executor: UniExecutor) -> None:
    ids = prompt(30, 9)
    params = SamplingParams(temperature=1.0, top_p=0.95)
    alone = run(
        executor,
        plan(Row(0, 0, 30, True, blocks(0, 48)), new=(New(0, ids, params, seed=11),)),
        *(plan(Row(0, 30 + i, 1, True)) for i in range(6)),
    )
    others = tuple(New(s, prompt(9, s), params, seed=s) for s in (1, 2))
    mixed = run(
        executor,
        plan(
            *(Row(s, 0, 9, True, blocks(40 + s, 16)) for s in (1, 2)),
            Row(5, 0, 13, False, blocks(60, 48)),
            new=(*others, New(5, ids, params, seed=11)),
        ),
        plan(Row(1, 9, 1, True), Row(5, 13, 17, True), Row(2, 9, 1, True)),
        *(plan(Row(5, 30 + i, 1, True), Row(2, 10 + i, 1, True)) for i in range(6)),
    )
    assert [mixed[1][1], *(step[0] for step in mixed[2:])] == [step[0] for step in alone]
