"""From a plan and the slots to the tensors of one step, in buffers that persist."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from octavo.core.plan import POOL, PROMPT_LOGPROBS, SAMPLE, StepPlan, laid_out
from octavo.model.batch import ForwardBatch
from octavo.worker.slots import Slots

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]


@dataclass(slots=True)
class StepBatch:
    """One step, its n rows in computing order (see Rows)."""

    forward: ForwardBatch
    plan_rows: Int64  # [n] the plan's row behind each row here
    slots: Int32  # [n]
    starts: Int32  # [n] position of the row's first token
    num_tokens: Int32  # [n]
    drawing: Int64  # [r] rows that draw
    draw_positions: Int32  # [r] index of the (first) token each of them draws
    num_guesses: Int32  # [r] guesses of each of them, which are its last tokens; it draws one
    # token for each and one more, from so many consecutive ``forward.logit_rows``
    scored: Int64  # rows whose own tokens want log-probabilities
    pooled: Int64  # rows whose hidden states are pooled
    first_tokens: Int64  # [n] index of each row's first token in the batch


@dataclass(slots=True)
class Rows:
    """A plan's n rows in computing order: rows of a single token first, those with the longest
    context foremost. A GPU starts programs in the order of rows: the last should end soon."""

    plan_rows: Int64  # [n] the plan's row behind each row here
    slots: Int32
    starts: Int32
    num_tokens: Int32
    flags: NDArray[np.uint8]
    decode_rows: int  # how many bring a single token


def order_rows(
    plan: StepPlan, starts: Int32 | None = None, num_tokens: Int32 | None = None
) -> Rows:
    """``starts``, ``num_tokens``: of the plan's rows, [n], where guesses made them others than the
    plan's."""
    starts = plan.starts if starts is None else starts
    num_tokens = plan.num_tokens if num_tokens is None else num_tokens
    single = num_tokens == 1
    decode_rows = int(np.count_nonzero(single))
    order = np.argsort(np.where(single, -starts, 1), kind="stable")
    return Rows(
        order,
        plan.slots[order],
        starts[order],
        num_tokens[order],
        plan.flags[order],
        decode_rows,
    )


class BatchBuilder:
    """Builds ForwardBatches for up to ``max_rows`` rows and ``max_tokens`` tokens.

    The buffers are reused: a batch is valid until the next one is built.
    """

    def __init__(self, slots: Slots, max_tokens: int, max_rows: int) -> None:
        self.slots = slots
        self.max_tokens = max_tokens
        self.max_rows = max_rows
        self._ids = torch.zeros(max_tokens, dtype=torch.int64)
        self._positions = torch.zeros(max_tokens, dtype=torch.int64)
        self._mapping = torch.zeros(max_tokens, dtype=torch.int64)
        self._starts = torch.zeros(max_rows + 1, dtype=torch.int32)
        self._lens = torch.zeros(max_rows, dtype=torch.int32)
        self._tables = torch.zeros(max_rows * slots.max_blocks, dtype=torch.int32)
        self._logit_rows = torch.zeros(max_tokens, dtype=torch.int64)

    def build(self, plan: StepPlan, guesses: Int32 | None = None) -> StepBatch:
        """The batch of ``plan``, whose changes the slots must have applied already. ``guesses``:
        that each row brings, [n], at most the plan's ``num_drafts``; their ids are in the slots'
        histories behind what is known.

        Raises ValueError for a plan beyond the buffers.
        """
        n, total = plan.num_rows, plan.total_tokens
        if n > self.max_rows or total > self.max_tokens:
            raise ValueError(
                f"step {plan.step} has {n} rows and {total} tokens; the worker holds "
                f"{self.max_rows} rows and {self.max_tokens} tokens"
            )
        num_guesses = np.zeros(n, dtype=np.int32) if guesses is None else guesses
        rows = order_rows(plan, self.slots.starts(plan), plan.num_known + num_guesses)
        num_guesses = num_guesses[rows.plan_rows]
        slots, starts, num_tokens, flags = rows.slots, rows.starts, rows.num_tokens, rows.flags
        query_starts = _pointers(num_tokens)
        drawing = ((flags & SAMPLE) != 0).nonzero()[0]
        ends = starts + num_tokens
        num_guesses = num_guesses[drawing]
        logit_rows = query_starts[drawing + 1] - 1
        if guesses is not None:
            each, places = laid_out(num_guesses + 1)
            logit_rows = (logit_rows - num_guesses)[each] + places
        forward = self._fill(slots, starts, num_tokens, query_starts, logit_rows)
        forward.decode_rows = rows.decode_rows
        return StepBatch(
            forward=forward,
            plan_rows=rows.plan_rows,
            slots=slots,
            starts=starts,
            num_tokens=num_tokens,
            drawing=drawing,
            draw_positions=ends[drawing] - num_guesses,
            num_guesses=num_guesses,
            scored=((flags & PROMPT_LOGPROBS) != 0).nonzero()[0],
            pooled=((flags & POOL) != 0).nonzero()[0],
            first_tokens=query_starts[:-1],
        )

    def fill(self, slots: Int32, starts: Int32, num_tokens: Int32) -> ForwardBatch:
        """A batch without a plan, of tokens that are in the slots' histories, each [n]; rows of a
        single token come first. Logits are wanted of the last token of each row."""
        query_starts = _pointers(num_tokens)
        forward = self._fill(slots, starts, num_tokens, query_starts, query_starts[1:] - 1)
        forward.decode_rows = int(np.count_nonzero(num_tokens == 1))
        return forward

    def _fill(
        self,
        slots: Int32,
        starts: Int32,
        num_tokens: Int32,
        query_starts: Int64,
        logit_rows: Int64,
    ) -> ForwardBatch:
        state, size = self.slots, self.slots.block_size
        n, total = len(slots), int(query_starts[-1])
        ends = starts + num_tokens
        positions, token_slots = starts.astype(np.int64), slots
        if total > n:
            positions = np.arange(total) + np.repeat(starts - query_starts[:-1], num_tokens)
            token_slots = np.repeat(slots, num_tokens)
        self._ids.numpy()[:total] = state.history_host[token_slots, positions]
        self._positions.numpy()[:total] = positions
        blocks = state.block_table_host[token_slots, positions // size].astype(np.int64)
        self._mapping.numpy()[:total] = blocks * size + positions % size
        self._starts.numpy()[: n + 1] = query_starts
        self._lens.numpy()[:n] = ends
        width = int(-(-ends.max() // size))
        tables = self._tables[: n * width].view(n, width)
        tables.numpy()[:] = state.block_table_host[:, :width][slots]
        self._logit_rows.numpy()[: len(logit_rows)] = logit_rows
        return ForwardBatch(
            token_ids=self._ids[:total],
            positions=self._positions[:total],
            slot_mapping=self._mapping[:total],
            query_starts_host=query_starts.tolist(),
            seq_lens_host=ends.tolist(),
            query_starts=self._starts[: n + 1],
            seq_lens=self._lens[:n],
            block_tables=tables,
            block_size=size,
            decode_rows=0,
            logit_rows=self._logit_rows[: len(logit_rows)],
        )


def _pointers(counts: Int32) -> Int64:
    pointers = np.zeros(len(counts) + 1, dtype=np.int64)
    np.cumsum(counts, out=pointers[1:])
    return pointers
