"""Steps on a device, padded to the shape of a graph and not, on a model checked by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from octavo.core.plan import StepPlan
from octavo.ops.triton.step import COUNT, FIRST_TOKEN, SLOT
from octavo.types import SamplingParams
from octavo.worker.batch import order_rows
from octavo.worker.device_step import DeviceStep, _padding
from octavo.worker.graphs import Shape
from tests.worker.interpreted import BLOCK, MAX_LEN, Interpreted
from tests.worker.plans import New, Row, plan

HOT = SamplingParams(temperature=1.0, top_p=0.9, frequency_penalty=0.5)


@pytest.mark.parametrize(
    "shape,num_tokens,num_rows",
    [
        (Shape(5), 0, 0),
        (Shape(0, 4, 64), 64, 3),
        (Shape(0, 4, 64), 7, 2),
        (Shape(8, 4, 64), 0, 0),
        (Shape(8, 4, 64), 33, 1),
        (Shape(3, 2, 9), 9, 2),  # nothing to pad
    ],
)
def test_the_tokens_of_padding_continue_those_of_the_rows(
    shape: Shape, num_tokens: int, num_rows: int
) -> None:
    """Row i begins where row i - 1 ends, in the places of the rows as in those of padding."""
    records = _padding(shape, num_tokens, num_rows)
    decode = shape.decode_rows
    assert (records[:, SLOT] == -1).all()
    counts, first = records[:, COUNT].copy(), records[:, FIRST_TOKEN].copy()
    own = slice(decode, decode + num_rows)
    counts[own] = np.diff(np.linspace(0, num_tokens, num_rows + 1).astype(int))
    first[own] = decode + np.cumsum(counts[own]) - counts[own]
    assert first.tolist() == (np.cumsum(counts) - counts).tolist()
    assert counts.sum() == shape.num_tokens and (counts[:decode] == 1).all()


def prompt(slot: int, length: int) -> list[int]:
    return [(slot * 31 + i * 7) % 97 for i in range(length)]


def lives() -> list[StepPlan]:
    """Rows of every kind: whole prompts, chunks with and without a draw, single tokens that draw
    and that do not, a fork, a slot that is freed and placed again in the same plan."""
    return [
        plan(
            Row(3, 0, 5, draw=True, blocks=[1, 2]),
            Row(1, 0, 1, blocks=[3]),
            Row(6, 0, 13, blocks=[4, 5, 6, 7]),
            new=(New(3, prompt(3, 5), HOT, 7), New(1, prompt(1, 3)), New(6, prompt(6, 20), HOT, 9)),
        ),
        plan(
            Row(1, 1, 2, draw=True),
            Row(3, 5, 1, draw=True),
            Row(6, 13, 1),
            step=1,
        ),
        plan(
            Row(6, 14, 6, draw=True, blocks=[8], block_start=4),
            Row(3, 6, 1, draw=True),
            Row(0, 0, 9, draw=True, blocks=[3, 9, 10]),
            Row(2, 6, 1, draw=True, blocks=[1, 11]),
            new=(New(0, prompt(0, 9), HOT, 1), New(2, [*prompt(3, 5), 40, 41], HOT, 2)),
            freed=(1,),
            copies=((2, 11),),
            step=2,
        ),
        plan(
            Row(0, 9, 1, draw=True),
            Row(2, 0, 4, draw=True, blocks=[12, 14]),
            Row(6, 20, 1, draw=True, blocks=[13], block_start=5),
            Row(3, 7, 1, draw=True),
            new=(New(2, prompt(2, 4), HOT, 3),),
            freed=(2,),
            step=3,
        ),
        plan(*(Row(s, n, 1, draw=True) for s, n in ((0, 10), (2, 4), (6, 21))), freed=(3,), step=4),
    ]


class Direct:
    """Steps computed in a shape that is given."""

    def __init__(self, **sizes: int) -> None:
        self.runner = Interpreted(**sizes)
        self.step: DeviceStep = self.runner.gpu.step

    def run(self, plan: StepPlan, extra: Shape) -> list[int]:
        """What the rows that draw drew, in the order of the plan. ``extra``: padding."""
        self.runner.slots.apply(plan)
        self.step.place(plan)
        self.step.copy_blocks(plan)
        rows = order_rows(plan)
        n, decode = plan.num_rows, rows.decode_rows
        shape = Shape(
            decode + extra.decode_rows,
            n - decode + extra.prompt_rows,
            plan.total_tokens - decode + extra.prompt_tokens,
        )
        places = self.step.stage(plan, rows, shape)
        assert places.dtype == np.int32 and len(set(places)) == n
        self.step.compute(shape)
        tokens = self.step.tokens.numpy()[places]
        draws = (rows.flags & 1) != 0
        self.runner.slots.length[rows.slots[draws]] = (rows.starts + rows.num_tokens)[draws] + 1
        drawn = dict(zip(rows.plan_rows[draws].tolist(), tokens[draws].tolist()))
        return [drawn[row] for row in sorted(drawn)]

    @property
    def state(self) -> list[torch.Tensor]:
        tables = self.step.tables
        return [tables.history, tables.block_table, tables.seen, *self.step.cache]


@pytest.fixture(scope="module")
def without_padding() -> list[tuple[list[int], list[torch.Tensor]]]:
    """What each step of the lives drew, and the state it left."""
    direct = Direct()
    with torch.inference_mode():
        return [
            (direct.run(each, Shape(0)), [tensor.clone() for tensor in direct.state])
            for each in lives()
        ]


@pytest.mark.parametrize("extra", [Shape(3), Shape(0, 1, 11), Shape(5, 7, 20)])
@torch.inference_mode()
def test_padding_changes_no_draw_and_nothing_that_outlives_the_step(
    extra: Shape, without_padding: list[tuple[list[int], list[torch.Tensor]]]
) -> None:
    padded = Direct()
    for each, (drawn, state) in zip(lives(), without_padding):
        assert padded.run(each, extra) == drawn
        for one, other in zip(padded.state, state):
            assert torch.equal(one, other)


@torch.inference_mode()
def test_a_step_as_large_as_the_worker_takes_fits_its_buffers() -> None:
    """All rows new, of full length, each with all its blocks: more than any scheduler has."""
    seqs = 3
    direct = Direct(max_num_seqs=seqs, max_tokens=seqs * (MAX_LEN - 1))
    width = direct.runner.slots.max_blocks
    count = MAX_LEN - 1
    direct.step.cache = direct.runner.model.allocate_cache(seqs * width, BLOCK)
    rows = [
        Row(s, 0, count, draw=True, blocks=list(range(s * width, (s + 1) * width)))
        for s in range(seqs)
    ]
    new = tuple(New(s, prompt(s, count)) for s in range(seqs))
    drawn = direct.run(plan(*rows, new=new), Shape(0))
    model = direct.runner.model
    assert drawn == [int(model.expected(prompt(s, count)).argmax()) for s in range(seqs)]
    last = direct.run(plan(*(Row(s, count, 1, draw=True) for s in range(seqs)), step=1), Shape(0))
    for slot in range(seqs):
        ids = [*prompt(slot, count), drawn[slot]]
        assert len(ids) == MAX_LEN and last[slot] == int(model.expected(ids).argmax())
        assert direct.step.tables.history[slot].tolist() == [*ids, last[slot]]


@torch.inference_mode()
def test_a_plan_beyond_the_buffers_is_refused_with_the_numbers() -> None:
    runner = Interpreted(max_num_seqs=2, max_tokens=16)
    assert (runner.gpu.step.max_rows, runner.gpu.step.max_tokens) == (66, 66)
    row = Row(0, 0, 67, blocks=list(range(17)))
    with pytest.raises(ValueError, match="has 1 rows and 67 tokens; the worker holds 66 rows"):
        runner.execute(plan(row, new=(New(0, prompt(0, 67)),)))
    assert runner.execute(plan(Row(0, 0, 2, draw=True, blocks=[0]), new=(New(0, [1, 2]),)))


@torch.inference_mode()
def test_many_new_requests_are_placed_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    from octavo.worker import device_step

    monkeypatch.setattr(device_step, "PLACED_IDS", 10)
    direct = Direct()
    lengths = [9, 1, 4, 7, 200, 2, 3, 3]
    new = tuple(New(s, prompt(s, n)) for s, n in enumerate(lengths))
    rows = [Row(s, 0, 1, blocks=[s]) for s in range(len(lengths))]
    direct.run(plan(*rows, new=new), Shape(0))
    for slot, length in enumerate(lengths):
        assert direct.step.tables.history[slot, :length].tolist() == prompt(slot, length)


@torch.inference_mode()
def test_after_a_failed_step_the_device_has_the_tables_that_the_host_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A row of a later plan that continues from it must not write into the blocks that another
    request had in the same place of the same slot."""
    runner = Interpreted()
    model, tables = runner.model, runner.gpu.step.tables
    runner.execute(plan(Row(0, 0, 8, blocks=[20, 21]), new=(New(0, prompt(0, 9)),)))
    runner.execute(
        plan(
            Row(1, 0, 8, draw=True, blocks=[20, 21]),  # blocks of slot 0, which ends
            Row(0, 0, 4, draw=True, blocks=[30]),
            new=(New(1, prompt(1, 8)), New(0, prompt(5, 4))),
            freed=(0,),
        )
    )
    monkeypatch.setattr(model, "copy_blocks", None)  # fails before the step has begun
    with pytest.raises(TypeError):
        runner.execute(plan(Row(0, 4, 1, draw=True, blocks=[31], block_start=1), copies=((1, 2),)))
    runner.execute(plan(Row(0, 5, 1, draw=True)))  # was in flight already
    assert tables.block_table[0, :2].tolist() == [30, 31]
    going_on = runner.execute(plan(Row(1, 8, 1, draw=True, blocks=[22], block_start=2)))
    ids = prompt(1, 8)
    ids.append(int(model.expected(ids).argmax()))
    assert going_on.tokens[0, 0] == int(model.expected(ids).argmax())


@torch.inference_mode()
def test_rehearsals_change_nothing_that_outlives_a_step() -> None:
    direct = Direct()
    for each in lives()[:3]:
        direct.run(each, Shape(0))
    before = [tensor.clone() for tensor in direct.state]
    for shape in (Shape(8), Shape(7, 1, 57), Shape(8, 4, 60)):
        direct.step.rehearse(shape)
    direct.step.rehearse_reports(8, 64, k=5)
    direct.step.rehearse_reports(8, 64, k=-1)
    assert all(torch.equal(one, other) for one, other in zip(before, direct.state))
    assert direct.run(lives()[3], Shape(0))


def test_places_are_given_for_every_row_of_the_plan() -> None:
    step = Interpreted().gpu.step
    each = plan(Row(4, 0, 2, blocks=[0]), Row(5, 0, 1, blocks=[1]), Row(6, 0, 3, blocks=[2]))
    rows = order_rows(each)
    assert step.stage(each, rows, Shape(1, 2, 5)).tolist() == [0, 1, 2]
    assert step.stage(each, rows, Shape(8, 4, 64)).tolist() == [0, 8, 9]
    staged = step._buffers.staged
    assert staged[: 12 * 8].view(12, 8)[[0, 8, 9], 0].tolist() == [5, 4, 6]
    assert staged[12 * 8 : 12 * 8 + 3].tolist() == [0, 1, 2]


def test_single_tokens_come_first_the_longest_context_foremost() -> None:
    each = plan(Row(0, 9, 4), Row(1, 5, 1), Row(2, 700, 1), Row(3, 0, 2), Row(4, 80, 1))
    rows = order_rows(each)
    assert rows.plan_rows.tolist() == [2, 4, 1, 0, 3] and rows.decode_rows == 3
    assert rows.starts.tolist() == [700, 80, 5, 9, 0] and rows.slots.tolist() == [2, 4, 1, 0, 3]
