"""Speculation on the device: guesses from the slots' own texts before a step, and after its draws
how far they were right. Nothing of it waits for the host, so that a step is one graph.

Every row of such a step brings QUERIES tokens: the last known one, then guesses; what is left over
is padding. ``worker.speculative.ngram`` defines which guesses those are.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from octavo.ops.triton.launch import next_power_of_2
from octavo.ops.triton.step import RECORD, StepBuffers, take_blocks

_CHUNK = 1024
_FAR = tl.constexpr(1 << 30)


def begin_guesses(
    buffers: StepBuffers,
    num_rows: int,
    queries: int,
    history: Tensor,
    block_table: Tensor,
    lengths: Tensor,
    guessed: Tensor,
    block_size: int,
    shortest: int,
    longest: int,
    scripted: bool,
) -> None:
    """Fills the buffers for the ``num_rows`` rows that are staged (padding included), each of
    ``queries`` tokens, and puts their new blocks into the slots' block tables.

    A record's COUNT is 1 + the most guesses of its row. history: int32 [slots, max_len + 1];
    block_table: int32 [slots, W], with room for ``queries`` tokens behind the longest text;
    lengths: int32 [slots], known tokens. guessed: int32 [num_rows], written: guesses of each row.
    shortest, longest: ids that must, and can, be matched. scripted: guess as many as there may be,
    whatever they are.
    """
    _begin_guesses[(num_rows,)](
        buffers.staged,
        num_rows,
        history,
        history.stride(0),
        block_table,
        block_table.stride(0),
        lengths,
        guessed,
        buffers.token_ids,
        buffers.positions,
        buffers.slot_mapping,
        buffers.query_starts,
        buffers.seq_lens,
        buffers.block_tables,
        buffers.block_tables.stride(0),
        buffers.draw_slots,
        buffers.draw_positions,
        BLOCK_SIZE=block_size,
        RECORD=RECORD,
        CHUNK=_CHUNK,
        QUERIES=queries,
        PADDED=next_power_of_2(queries),
        SHORTEST=shortest,
        LONGEST=longest,
        SCRIPTED=scripted,
        num_warps=8,
    )


def accept(
    buffers: StepBuffers,
    num_rows: int,
    queries: int,
    tokens: Tensor,
    guessed: Tensor,
    lengths: Tensor,
    counts: Tensor,
    rate: float | None = None,
) -> None:
    """How many of its draws each row keeps: those up to the first that its guess is not.

    tokens: int32 [num_rows * queries], drawn; guessed: int32 [num_rows]. lengths: int32 [slots],
    raised by what is kept. counts: int32 [num_rows], written; 0 for padding. ``rate``: of a script,
    how often a guess counts as right, whatever was drawn.
    """
    _accept[(num_rows,)](
        tokens,
        buffers.token_ids,
        guessed,
        buffers.draw_slots,
        buffers.draw_positions,
        lengths,
        counts,
        int((rate or 0.0) * (1 << 24)),
        QUERIES=queries,
        PADDED=next_power_of_2(queries),
        SCRIPTED=rate is not None,
        num_warps=1,
    )


@triton.jit(do_not_specialize=["num_rows"])
def _begin_guesses(
    staged, num_rows, history, history_stride, block_table, table_stride, lengths, guessed,
    token_ids, positions, slot_mapping, query_starts, seq_lens, block_tables, batch_stride,
    draw_slots, draw_positions,
    BLOCK_SIZE: tl.constexpr, RECORD: tl.constexpr, CHUNK: tl.constexpr, QUERIES: tl.constexpr,
    PADDED: tl.constexpr, SHORTEST: tl.constexpr, LONGEST: tl.constexpr, SCRIPTED: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    record = staged + row * RECORD
    slot = tl.load(record + 0)
    most = tl.load(record + 2) - 1
    real = slot >= 0
    own = tl.maximum(slot, 0).to(tl.int64)
    length = tl.where(real, tl.load(lengths + own), 1)
    text = history + own * history_stride
    own_table = block_table + own * table_stride
    lane = tl.arange(0, CHUNK)
    end = length - 1 + QUERIES
    width = tl.where(real, (end + BLOCK_SIZE - 1) // BLOCK_SIZE, 0)
    own_batch = block_tables + row.to(tl.int64) * batch_stride
    take_blocks(record, staged + num_rows * RECORD, own_table, own_batch, width, CHUNK)

    # Where the longest suffix of the text stands before, the latest of equal ones.
    count = most
    found = length - 1
    if not SCRIPTED:
        best = tl.zeros([], tl.int64)
        last = tl.load(text + length - 1)
        searched = tl.where(real & (most > 0), length - 1, 0)
        for at in range(0, searched, CHUNK):
            ends = at + lane
            alike = (ends < searched) & (tl.load(text + ends, mask=ends < searched) == last)
            if tl.max(alike.to(tl.int32), 0) > 0:
                matched = alike.to(tl.int64)
                for back in range(1, LONGEST):
                    alike = alike & (ends >= back) & (length - 1 >= back)
                    wanted = tl.load(text + tl.maximum(length - 1 - back, 0))
                    alike = alike & (tl.load(text + ends - back, mask=alike, other=-1) == wanted)
                    matched += alike.to(tl.int64)
                best = tl.maximum(best, tl.max(matched * 4294967296 + ends * (matched > 0), 0))
        matched = (best // 4294967296).to(tl.int32)
        found = tl.where(matched > 0, (best % 4294967296).to(tl.int32), length - 1)
        count = tl.where(matched >= SHORTEST, tl.minimum(matched, most), 0)
    count = tl.where(real, count, 0)

    i = tl.arange(0, PADDED)
    inside = i < QUERIES
    kept = inside & (i <= count) & real
    period = tl.maximum(length - 1 - found, 1)
    source = tl.where(i == 0, length - 1, tl.minimum(found + 1 + (i - 1) % period, length - 1))
    token = tl.load(text + source, mask=kept, other=0)
    position = length - 1 + i
    block = tl.load(own_table + position // BLOCK_SIZE, mask=kept, other=0).to(tl.int64)
    to = row * QUERIES + i
    tl.store(token_ids + to, token.to(tl.int64), mask=inside)
    tl.store(positions + to, tl.where(kept, position, 0).to(tl.int64), mask=inside)
    place = tl.where(kept, block * BLOCK_SIZE + position % BLOCK_SIZE, -1)
    tl.store(slot_mapping + to, place, mask=inside)
    tl.store(draw_slots + to, tl.where(kept, slot, -1), mask=inside)
    tl.store(draw_positions + to, position + 1, mask=inside)
    tl.store(guessed + row, count)
    tl.store(seq_lens + row, tl.where(real, end, 0))
    tl.store(query_starts + row, row * QUERIES)
    tl.store(query_starts + row + 1, (row + 1) * QUERIES)  # the next row writes the same


@triton.jit(do_not_specialize=["threshold"])
def _accept(
    tokens, token_ids, guessed, draw_slots, draw_positions, lengths, counts, threshold,
    QUERIES: tl.constexpr, PADDED: tl.constexpr, SCRIPTED: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    slot = tl.load(draw_slots + row * QUERIES)
    if slot < 0:
        tl.store(counts + row, 0)
        return
    i = tl.arange(0, PADDED)
    there = (i >= 1) & (i <= tl.load(guessed + row))
    drawn = tl.load(tokens + row * QUERIES + i - 1, mask=there, other=-1)
    right = drawn == tl.load(token_ids + row * QUERIES + i, mask=there, other=-2)
    position = tl.load(draw_positions + row * QUERIES)
    if SCRIPTED:
        mixed = ((position + i) * 1103515245 + slot * 12345).to(tl.uint32)
        mixed = (mixed ^ (mixed >> 15)) * 739982445
        mixed = (mixed ^ (mixed >> 12)) * 695872825
        right = ((mixed >> 8).to(tl.int32) < threshold) & there
    count = tl.min(tl.where(right | (i == 0), _FAR, i), 0)
    count = tl.minimum(count, PADDED)
    tl.store(counts + row, count)
    tl.store(lengths + slot, position + count)  # the first is drawn behind the known ones
