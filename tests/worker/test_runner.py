"""The worker's contract with plans, on a model whose every logit can be computed by hand."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
import torch

from octavo.core.plan import StepPlan, StepResult, decode, encode
from octavo.types import SamplingParams
from octavo.worker.runner import Runner
from tests.worker.interpreted import BLOCK, Interpreted, config
from tests.worker.plans import New, Row, SumModel, plan


@pytest.fixture(params=["cpu", "cuda", "cuda graphs"])
def runner(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Runner | Interpreted:
    if request.param != "cpu":
        pytest.importorskip("triton")
        return Interpreted(monkeypatch if request.param == "cuda graphs" else None)
    started = Runner(config(), Path("none"), lambda path, config, progress: SumModel())
    started.start(lambda *news: None)
    return started


def greedy(model: SumModel, prompt: list[int], count: int) -> list[int]:
    ids = list(prompt)
    for _ in range(count):
        ids.append(int(model.expected(ids).argmax()))
    return ids[len(prompt) :]


def run(runner: Runner, *plans: StepPlan) -> list[list[int]]:
    """Tokens of the drawing rows of each plan."""
    results = [runner.execute(p) for p in plans]
    return [r.tokens[r.num_accepted > 0, 0].tolist() for r in results]


PROMPT = [5, 17, 3, 88, 41, 2, 60]


def whole(slot: int = 0, block: int = 10, **new: object) -> StepPlan:
    blocks = list(range(block, block + 4))
    row = Row(slot, 0, len(PROMPT), draw=True, blocks=blocks)
    return plan(row, new=(New(slot, PROMPT, **new),))


def after(count: int, slot: int = 0) -> list[StepPlan]:
    return [plan(Row(slot, len(PROMPT) + i, 1, draw=True), step=i + 1) for i in range(count)]


def test_rows_continue_from_tokens_the_worker_drew(runner: Runner) -> None:
    drawn = run(runner, whole(), *after(5))
    assert [d[0] for d in drawn] == greedy(runner.model, PROMPT, 6)


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_chunks_of_any_size_equal_the_whole_prompt(runner: Runner, size: int) -> None:
    rows = []
    for start in range(0, len(PROMPT), size):
        count = min(size, len(PROMPT) - start)
        block, places = start // BLOCK, -(-(start + count) // BLOCK)
        fresh = list(range(20 + block + (start % BLOCK > 0), 20 + places))
        begin = block + (start % BLOCK > 0)
        last = start + count == len(PROMPT)
        rows.append(Row(0, start, count, draw=last, blocks=fresh, block_start=begin))
    first = plan(rows[0], new=(New(0, PROMPT),))
    drawn = run(runner, first, *(plan(row) for row in rows[1:]))
    assert drawn[-1] == greedy(runner.model, PROMPT, 1)
    assert all(not d for d in drawn[:-1])


def test_a_mixed_batch_returns_results_in_the_order_of_the_plan(runner: Runner) -> None:
    other, third = [9, 9, 1, 30], [70, 4]
    run(runner, whole(), plan(Row(3, 0, 4, True, [30, 31]), new=(New(3, other),)))
    result = runner.execute(
        plan(
            Row(5, 0, 2, draw=True, blocks=[40]),
            Row(0, len(PROMPT), 1, draw=True),
            Row(6, 0, 3, blocks=[41]),
            Row(3, 4, 1, draw=True),
            new=(New(5, third), New(6, PROMPT)),
        )
    )
    model = runner.model
    expected = [
        greedy(model, third, 1)[0],
        greedy(model, PROMPT, 2)[1],
        0,
        greedy(model, other, 2)[1],
    ]
    assert result.tokens[:, 0].tolist() == expected
    assert result.num_accepted.tolist() == [1, 1, 0, 1]


def test_a_freed_slot_serves_another_request_in_the_same_plan(runner: Runner) -> None:
    penalised = SamplingParams(temperature=0.0, frequency_penalty=2.0, min_tokens=3)
    run(runner, whole(params=penalised, min_stop_ids=[1]), *after(2))
    other = [33, 12, 8]
    drawn = run(
        runner,
        plan(Row(0, 0, 3, True, [11]), new=(New(0, other),), freed=(0,)),
        plan(Row(0, 3, 1, True)),
    )
    assert [d[0] for d in drawn] == greedy(runner.model, other, 2)


def test_a_request_that_returns_after_preemption_goes_on_where_it_was(runner: Runner) -> None:
    params = SamplingParams(temperature=0.9, seed=3, frequency_penalty=1.0)
    through = [d[0] for d in run(runner, whole(params=params, seed=3), *after(6))]
    ids = PROMPT + through[:3]
    back = New(4, ids, params=params, seed=3, prompt_len=len(PROMPT))
    row = Row(4, 0, len(ids), draw=True, blocks=[30, 31, 32, 33])
    again = run(
        runner,
        plan(row, new=(back,), freed=(0,)),
        *(plan(Row(4, len(ids) + i, 1, draw=True)) for i in range(3)),
    )
    assert [d[0] for d in again] == through[3:]


def test_forked_requests_share_blocks_and_copies_are_made_before_writes(runner: Runner) -> None:
    run(runner, whole(block=10))  # blocks 10, 11; 7 tokens: block 11 has room for one more
    fork = [*PROMPT, 50, 51]
    result = runner.execute(
        plan(
            Row(0, 7, 1, draw=True),  # writes into block 11 after it has been copied
            Row(1, 7, 2, draw=True, blocks=[10, 20, 21]),
            new=(New(1, fork),),
            copies=((11, 20),),
        )
    )
    expected = [greedy(runner.model, PROMPT, 2)[1], greedy(runner.model, fork, 1)[0]]
    assert result.tokens[:, 0].tolist() == expected


def test_a_recorded_plan_replays_to_the_same_result(runner: Runner) -> None:
    params = SamplingParams(temperature=1.0, top_p=0.9, logprobs=3, logit_bias={7: 2.0})
    plans = [whole(params=params, seed=2**63 + 5), *after(3)]
    first = [runner.execute(p) for p in plans]
    runner.execute(plan(Row(7, 0, 1, blocks=[50]), new=(New(7, [1]),), freed=(0,)))
    second = [runner.execute(decode(encode(p), StepPlan)) for p in plans]
    for one, two in zip(first, second):
        assert encode(one) == encode(two)
        back = decode(encode(one), StepResult)
        assert all(type(getattr(back, f.name)) is type(getattr(one, f.name)) for f in fields(one))


def test_prompt_logprobs_by_chunks_equal_those_of_the_whole(runner: Runner) -> None:
    params = SamplingParams(temperature=0.0, prompt_logprobs=2)
    runner.logit_rows = 2  # force several slices
    row = Row(0, 0, 7, draw=True, blocks=[1, 2], score=True)
    result = runner.execute(plan(row, new=(New(0, PROMPT, params),)))
    found = result.prompt_logprobs[0]
    assert found.ids.shape == (6, 3)
    assert found.ids[:, 0].tolist() == PROMPT[1:]
    for i in range(6):
        scores = runner.model.expected(PROMPT[: i + 1]).log_softmax(-1)
        assert found.values[i, 0] == pytest.approx(float(scores[PROMPT[i + 1]]), abs=1e-4)
        assert found.ranks[i] == int((scores > scores[PROMPT[i + 1]]).sum()) + 1
        np.testing.assert_allclose(found.values[i, 1:], scores.topk(2).values, atol=1e-4)

    chunks = [
        runner.execute(
            plan(
                Row(1, 0, 3, blocks=[4], score=True),
                Row(2, 0, 1, draw=True, blocks=[6]),
                new=(New(1, PROMPT, params), New(2, [1])),
            )
        ),
        runner.execute(plan(Row(1, 3, 3, blocks=[5], block_start=1, score=True))),
        runner.execute(plan(Row(1, 6, 1, draw=True, score=True))),
    ]
    parts = [chunk.prompt_logprobs[0] for chunk in chunks]
    assert [len(part.ids) for part in parts] == [3, 3, 0]
    np.testing.assert_array_equal(np.concatenate([p.ids for p in parts]), found.ids)
    np.testing.assert_array_equal(np.concatenate([p.ranks for p in parts]), found.ranks)


def test_draws_are_the_same_when_logits_come_in_slices(runner: Runner) -> None:
    hot = SamplingParams(temperature=1.0, logprobs=1)
    cold = SamplingParams(temperature=0.0, logprobs=4)
    news = tuple(New(s, [s + 1], hot if s % 2 else cold, seed=s) for s in range(6))
    rows = [Row(s, 0, 1, draw=True, blocks=[s]) for s in range(6)]
    whole_step = runner.execute(plan(*rows, new=news))
    runner.logit_rows = 2
    sliced = runner.execute(plan(*rows, new=news, freed=tuple(range(6))))
    np.testing.assert_array_equal(whole_step.tokens, sliced.tokens)
    np.testing.assert_array_equal(whole_step.logprob_rows, sliced.logprob_rows)
    np.testing.assert_array_equal(whole_step.logprobs.ids, sliced.logprobs.ids)


def test_a_row_beyond_its_tokens_or_blocks_is_refused_with_the_numbers(runner: Runner) -> None:
    run(runner, whole())
    with pytest.raises(ValueError, match="token 10 of slot 0, which has 8"):
        runner.execute(plan(Row(0, 8, 2)))
    with pytest.raises(ValueError, match="writes 5 tokens to slot 2, whose blocks hold 4"):
        runner.execute(plan(Row(2, 0, 5, blocks=[60]), new=(New(2, [1] * 5),)))


def test_a_failed_step_leaves_slots_for_the_plans_behind_it(runner: Runner) -> None:
    run(runner, whole())
    runner.model.fail = True
    other = [33, 12, 8]
    with pytest.raises(RuntimeError, match="no such kernel"):
        runner.execute(
            plan(
                Row(0, 7, 1, draw=True),
                Row(1, 0, 3, blocks=[30, 31]),
                new=(New(1, other),),
            )
        )
    runner.model.fail = False
    result = runner.execute(
        plan(
            Row(0, 8, 1, draw=True),  # was in flight already; its result is dropped
            Row(2, 0, 3, draw=True, blocks=[32]),
            new=(New(2, other),),
        )
    )
    assert result.tokens[1, 0] == greedy(runner.model, other, 1)[0]
    assert run(runner, plan(Row(3, 0, 3, True, [33]), new=(New(3, other),), freed=(0, 1)))[0] == [
        greedy(runner.model, other, 1)[0]
    ]


def test_start_reports_what_was_found() -> None:
    phases = []
    runner = Runner(config(), Path("none"), lambda path, config, progress: SumModel())
    info = runner.start(lambda phase, *how_far: phases.append(phase))
    assert phases == ["cache", "warm-up"]
    assert set(info.startup_seconds) == {"cache", "warm-up"}
    assert (info.num_blocks, info.block_size, info.max_model_len) == (64, 4, 256)
    assert info.kv_cache_bytes == 64 * 4 * 8 * 4
    assert torch.get_num_threads() == info.threads
    assert runner.slots.length.sum() == 0
