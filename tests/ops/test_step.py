"""The kernels that begin a step, against the host's BatchBuilder on the same plans."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from octavo.worker.batch import BatchBuilder, order_rows
from octavo.worker.slots import Slots
from tests.worker.plans import New, Row, plan

step = pytest.importorskip("octavo.ops.triton.step")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SIZE = 4  # tokens in a block


def staged(plan, rows, padded, buffers):
    records = np.zeros((padded, step.RECORD), dtype=np.int32)
    records[:, step.SLOT] = -1
    records[:, step.COUNT] = 1
    n = plan.num_rows
    starts = np.cumsum([0, *rows.num_tokens])
    records[:n, step.SLOT], records[:n, step.START] = rows.slots, rows.starts
    records[:n, step.COUNT], records[:n, step.FIRST_TOKEN] = rows.num_tokens, starts[:-1]
    records[n:, step.FIRST_TOKEN] = starts[-1] + np.arange(padded - n)
    records[:n, step.BLOCK_INDEX] = plan.block_starts[rows.plan_rows]
    records[:n, step.NEW_BLOCKS] = np.diff(plan.block_indptr)[rows.plan_rows]
    records[:n, step.FIRST_BLOCK] = plan.block_indptr[rows.plan_rows]
    records[:n, step.DRAWS] = rows.flags & 1
    values = np.concatenate([records.reshape(-1), plan.block_ids])
    buffers.staged[: len(values)] = torch.from_numpy(values).to(DEVICE)


@pytest.mark.parametrize("padded", [3, 5])
def test_rows_become_the_batch_the_host_would_build(padded: int) -> None:
    slots = Slots(4, 60, SIZE, vocab_size=97)
    random = np.random.default_rng(0)
    prompts = {s: random.integers(0, 97, n).tolist() for s, n in ((0, 6), (2, 13), (3, 50))}
    history = torch.zeros(4, 61, dtype=torch.int32, device=DEVICE)
    table = torch.zeros(4, slots.max_blocks, dtype=torch.int32, device=DEVICE)
    buffers = step.StepBuffers.allocate(8, 128, slots.max_blocks, 64, DEVICE)
    builder = BatchBuilder(slots, 128, 8)
    first = plan(
        Row(2, 0, 12, blocks=[9, 3, 7, 5]),
        Row(0, 5, 1, draw=True, blocks=[2, 8]),
        Row(3, 10, 37, blocks=[20, 11, 12, 13, 14, 15, 16, 17, 18, 19, 1, 0]),
        new=tuple(New(s, ids) for s, ids in prompts.items()),
    )
    second = plan(Row(2, 12, 1, draw=True), Row(3, 47, 3, draw=True, blocks=[30], block_start=12))

    bounds = torch.tensor(first.new_indptr, device=DEVICE)
    ids = torch.tensor(first.new_token_ids, device=DEVICE)
    step.place(history, ids, bounds, torch.tensor([0, 2, 3], dtype=torch.int32, device=DEVICE))
    for each in (first, second):
        slots.apply(each)
        rows = order_rows(each)
        staged(each, rows, padded, buffers)
        step.begin_step(buffers, padded, history, table, SIZE)
        want = builder.build(each).forward
        n, total = each.num_rows, each.total_tokens
        assert buffers.token_ids[:total].tolist() == want.token_ids.tolist()
        assert buffers.positions[:total].tolist() == want.positions.tolist()
        assert buffers.slot_mapping[:total].tolist() == want.slot_mapping.tolist()
        assert buffers.query_starts[: n + 1].tolist() == want.query_starts_host
        assert buffers.seq_lens[:n].tolist() == want.seq_lens_host
        for row, length in enumerate(want.seq_lens_host):
            width = -(-length // SIZE)
            found = buffers.block_tables[row, :width].tolist()
            assert found == want.block_tables[row, :width].tolist()
        draws = (rows.flags & 1).astype(bool)
        assert buffers.draw_slots[:n].tolist() == np.where(draws, rows.slots, -1).tolist()
        assert buffers.draw_positions[:n].tolist() == want.seq_lens_host
        ends = np.cumsum(rows.num_tokens) - 1
        assert buffers.logit_rows[:n].tolist() == ends.tolist()
        # Padding: no context, no KV, tokens after the others.
        assert buffers.draw_slots[n:padded].tolist() == [-1] * (padded - n)
        assert buffers.seq_lens[n:padded].tolist() == [0] * (padded - n)
        assert buffers.slot_mapping[total : total + padded - n].tolist() == [-1] * (padded - n)
        assert buffers.token_ids[total : total + padded - n].tolist() == [0] * (padded - n)
        spread = [total + i for i in range(padded - n + 1)]
        assert buffers.query_starts[n : padded + 1].tolist() == spread


def test_placing_writes_only_the_given_histories() -> None:
    history = torch.full((4, 3000), -7, dtype=torch.int32, device=DEVICE)
    lengths = [1, 2500]
    ids = torch.arange(2501, dtype=torch.int32, device=DEVICE)
    bounds = torch.tensor([0, 1, 2501], dtype=torch.int32, device=DEVICE)
    step.place(history, ids, bounds, torch.tensor([3, 1], dtype=torch.int32, device=DEVICE))
    assert history[3, :1].tolist() == [0]
    assert history[1, :2500].tolist() == list(range(1, 2501))
    rest = history.clone()
    rest[3, : lengths[0]] = -7
    rest[1, : lengths[1]] = -7
    assert (rest == -7).all()
