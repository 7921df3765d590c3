"""The first kernels of a step: new requests into the histories, and a plan's rows into its batch.

A plan arrives as one staged int32 array: ``RECORD`` numbers a row, then the new block ids of all
rows. Everything else about the batch is derived here, from the slots' state on the device, so that
a step is the same sequence of launches whatever the lengths are. ``worker.batch.BatchBuilder`` is
the definition.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

RECORD = 8  # slot, start, count, first token, block index, new blocks, first new block, draws
SLOT, START, COUNT, FIRST_TOKEN, BLOCK_INDEX, NEW_BLOCKS, FIRST_BLOCK, DRAWS = range(RECORD)
_CHUNK = 1024


@dataclass
class StepBuffers:
    """The tensors of one step for up to R rows and T tokens, at addresses that never change.

    A row of padding (slot -1) computes tokens of id 0 at position 0 without context and writes no
    KV: its ``seq_lens`` is 0, their ``slot_mapping`` -1. It may have no token at all.
    """

    staged: Tensor  # int32 [R * RECORD + new blocks]
    token_ids: Tensor  # int64 [T]
    positions: Tensor  # int64 [T]
    slot_mapping: Tensor  # int64 [T]
    query_starts: Tensor  # int32 [R + 1]
    seq_lens: Tensor  # int32 [R]
    block_tables: Tensor  # int32 [R, W]
    logit_rows: Tensor  # int64 [R] the last token of each row
    draw_slots: Tensor  # int32 [R], -1 where the row does not draw
    draw_positions: Tensor  # int32 [R] index of the token that is drawn

    @classmethod
    def allocate(
        cls, rows: int, tokens: int, width: int, new_blocks: int, device: torch.device
    ) -> StepBuffers:
        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        return cls(
            staged=zeros(rows * RECORD + new_blocks),
            token_ids=zeros(tokens, dtype=torch.int64),
            positions=zeros(tokens, dtype=torch.int64),
            slot_mapping=zeros(tokens, dtype=torch.int64),
            query_starts=zeros(rows + 1),
            seq_lens=zeros(rows),
            block_tables=zeros(rows, width),
            logit_rows=zeros(rows, dtype=torch.int64),
            draw_slots=zeros(rows),
            draw_positions=zeros(rows),
        )


def begin_step(
    buffers: StepBuffers,
    num_rows: int,
    history: Tensor,
    block_table: Tensor,
    block_size: int,
    lengths: Tensor | None = None,
) -> None:
    """Fills the buffers for the ``num_rows`` rows (padding included) that are staged, and puts
    their new blocks into the slots' block tables.

    history: int32 [slots, max_len + 1]; block_table: int32 [slots, W]. lengths: int32 [slots],
    tokens known of each slot: with speculation they alone tell where rows that draw begin; raised
    by the token that is drawn.
    """
    _begin_rows[(num_rows,)](
        buffers.staged,
        num_rows,
        history,
        history.stride(0),
        block_table,
        block_table.stride(0),
        lengths,
        buffers.token_ids,
        buffers.positions,
        buffers.slot_mapping,
        buffers.query_starts,
        buffers.seq_lens,
        buffers.block_tables,
        buffers.block_tables.stride(0),
        buffers.logit_rows,
        buffers.draw_slots,
        buffers.draw_positions,
        FROM_LENGTHS=lengths is not None,
        BLOCK_SIZE=block_size,
        RECORD=RECORD,
        CHUNK=_CHUNK,
        num_warps=4,
    )


def place(history: Tensor, ids: Tensor, bounds: Tensor, slots: Tensor) -> None:
    """history[slots[i], :n_i] = ids[bounds[i] : bounds[i + 1]].

    ids: int32 [sum n_i]; bounds: int32 [r + 1]; slots: int32 [r].
    """
    _place[(len(slots),)](history, history.stride(0), ids, bounds, slots, CHUNK=_CHUNK, num_warps=4)


@triton.jit
def take_blocks(record, new_ids, own_table, own_batch, width, CHUNK: tl.constexpr):
    """Puts a row's new blocks into its slot's table, and the first ``width`` entries of that into
    the batch's. ``new_ids``: of all rows."""
    lane = tl.arange(0, CHUNK)
    block_index = tl.load(record + 4)
    new_blocks = tl.load(record + 5)
    blocks = new_ids + tl.load(record + 6)
    for at in range(0, new_blocks, CHUNK):
        inside = at + lane < new_blocks
        ids = tl.load(blocks + at + lane, mask=inside, other=0)
        tl.store(own_table + block_index + at + lane, ids, mask=inside)
    tl.debug_barrier()  # the table's new entries are read below, by other threads
    for at in range(0, width, CHUNK):
        inside = at + lane < width
        ids = tl.load(own_table + at + lane, mask=inside, other=0)
        tl.store(own_batch + at + lane, ids, mask=inside)


@triton.jit(do_not_specialize=["num_rows"])
def _begin_rows(
    staged,
    num_rows,
    history,
    history_stride,
    block_table,
    table_stride,
    lengths,
    token_ids,
    positions,
    slot_mapping,
    query_starts,
    seq_lens,
    block_tables,
    batch_stride,
    logit_rows,
    draw_slots,
    draw_positions,
    FROM_LENGTHS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    RECORD: tl.constexpr,
    CHUNK: tl.constexpr,
):
    row = tl.program_id(0)
    record = staged + row * RECORD
    slot = tl.load(record + 0)
    start = tl.load(record + 1)
    count = tl.load(record + 2)
    first = tl.load(record + 3)
    draws = tl.load(record + 7)
    real = slot >= 0
    if FROM_LENGTHS:
        own_length = lengths + tl.maximum(slot, 0)
        draws_here = real & (draws != 0)
        start = tl.where(draws_here, tl.load(own_length) - count, start)
        tl.debug_barrier()  # all threads have read it
        tl.store(own_length, start + count + 1, mask=draws_here)
    end = start + count
    lane = tl.arange(0, CHUNK)
    own_history = history + tl.maximum(slot, 0).to(tl.int64) * history_stride
    own_table = block_table + tl.maximum(slot, 0).to(tl.int64) * table_stride

    width = tl.where(real, (end + BLOCK_SIZE - 1) // BLOCK_SIZE, 0)
    own_batch = block_tables + row.to(tl.int64) * batch_stride
    take_blocks(record, staged + num_rows * RECORD, own_table, own_batch, width, CHUNK)

    for at in range(0, count, CHUNK):
        inside = at + lane < count
        known = inside & real
        position = start + at + lane
        token = tl.load(own_history + position, mask=known, other=0)
        block = tl.load(own_table + position // BLOCK_SIZE, mask=known, other=0).to(tl.int64)
        place = tl.where(real, block * BLOCK_SIZE + position % BLOCK_SIZE, -1)
        tl.store(token_ids + first + at + lane, token.to(tl.int64), mask=inside)
        shown = tl.where(real, position, 0).to(tl.int64)
        tl.store(positions + first + at + lane, shown, mask=inside)
        tl.store(slot_mapping + first + at + lane, place, mask=inside)

    tl.store(seq_lens + row, tl.where(real, end, 0))
    tl.store(query_starts + row, first)
    tl.store(query_starts + row + 1, first + count)  # the next row writes the same
    tl.store(logit_rows + row, tl.maximum(first + count - 1, 0).to(tl.int64))
    tl.store(draw_slots + row, tl.where(draws != 0, slot, -1))
    tl.store(draw_positions + row, end)


@triton.jit(do_not_specialize_on_alignment=["ids", "bounds", "slots"])
def _place(history, history_stride, ids, bounds, slots, CHUNK: tl.constexpr):
    row = tl.program_id(0)
    slot = tl.load(slots + row).to(tl.int64)
    start = tl.load(bounds + row)
    count = tl.load(bounds + row + 1) - start
    lane = tl.arange(0, CHUNK)
    for at in range(0, count, CHUNK):
        inside = at + lane < count
        values = tl.load(ids + start + at + lane, mask=inside, other=0)
        tl.store(history + slot * history_stride + at + lane, values, mask=inside)
