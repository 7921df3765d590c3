"""PlanBuilder: collects one plan's rows, blocks and arrivals, then lays them out in columns."""

from __future__ import annotations

import numpy as np

from octavo.core.plan import POOL, PROMPT_LOGPROBS, SAMPLE, Int32, NewRequest, StepPlan
from octavo.core.request import Request
from octavo.core.running import Bools, Index, Running
from octavo.types import Pooling


def int32(values: object) -> Int32:
    return np.array(values, dtype=np.int32)


EMPTY = int32([])
NO_PAIRS = EMPTY.reshape(0, 2)
NO_ROWS = int32([0])  # index pointer of an empty CSR
NO_SLOTS: Index = np.zeros(0, dtype=np.intp)


class PlanBuilder:
    """One plan in the making. ``build`` marks its tokens as computed and its draws as coming."""

    def __init__(self, running: Running) -> None:
        self._running = running
        self.slots = NO_SLOTS  # of all rows once ``build`` was called
        self._counts = EMPTY
        self._drafts: Int32 | None = None
        self._new_slots: list[int] = []
        self._new_counts: list[int] = []
        self._new: list[tuple[NewRequest, Int32]] = []
        # New table entries, a column each: row, index in its table, number of ids; and the ids.
        self._grown: list[tuple[Index, Int32, Int32]] = []
        self._blocks: list[int] = []
        self._copies: list[tuple[int, int]] = []

    @property
    def num_rows(self) -> int:
        return len(self.slots) + len(self._new_slots)

    def set_rows(self, slots: Index, counts: Int32, drafts: Int32 | None = None) -> None:
        """The rows of requests that already run. ``drafts``: of the tokens in ``counts``, those
        that are guesses; None without speculation."""
        self.slots, self._counts, self._drafts = slots, counts, drafts

    def add_blocks(self, rows: Index, indices: Int32, counts: Int32, blocks: list[int]) -> None:
        """``counts[i]`` of the blocks go to the table of row ``rows[i]``, from ``indices[i]`` on.
        Rows come in order, each once."""
        self._grown.append((rows, indices, counts))
        self._blocks += blocks

    def add_copy(self, source: int, destination: int) -> None:
        self._copies.append((source, destination))

    def add_request(self, request: Request, slot: int, count: int, min_stop_ids: list[int]) -> None:
        """A request that takes a slot, with its first ``count`` tokens to compute."""
        new = NewRequest(
            slot,
            request.prompt_len,
            request.params,
            request.seed,
            min_stop_ids,
            request.bad_words,
            request.pooling,
            request.grammar,
            request.grammar_after,
        )
        row, num_blocks = np.array([self.num_rows]), int32([len(request.blocks)])
        self.add_blocks(row, NO_ROWS, num_blocks, request.blocks)
        self._new.append((new, request.tokens))
        self._new_slots.append(slot)
        self._new_counts.append(count)

    def build(self, step: int, freed_slots: list[int]) -> StepPlan:
        running = self._running
        slots, counts, drafts = self.slots, self._counts, self._drafts
        if self._new_slots:
            self.slots = slots = np.concatenate([slots, self._new_slots])
            counts = np.concatenate([counts, int32(self._new_counts)])
            if drafts is not None:
                drafts = np.pad(drafts, (0, len(self._new_slots)))
        starts = running.computed[slots]
        ends = starts + counts
        totals = running.total[slots]
        if drafts is not None:
            totals = totals + drafts  # should all guesses be right
        draws = ends == totals  # no row computes the last token it may have: nothing follows it
        pooled = self._pooled_rows(slots, draws) if running.pooling else None
        if pooled is not None:
            draws &= ~np.isin(slots, list(running.pooling))
        running.computed[slots] = ends
        running.total[slots] = totals + draws
        flags = draws.view(np.uint8) * SAMPLE
        if pooled is not None:
            flags[pooled] |= POOL
        if running.prompt_logprob_slots:
            self._flag_prompt_logprobs(flags, slots, starts)
        block_starts, block_indptr, block_ids = self._block_columns(len(slots))
        return StepPlan(
            step=step,
            slots=slots.astype(np.int32),
            num_tokens=counts,
            starts=starts,
            flags=flags,
            block_starts=block_starts,
            block_indptr=block_indptr,
            block_ids=block_ids,
            freed_slots=int32(freed_slots) if freed_slots else EMPTY,
            copies=int32(self._copies) if self._copies else NO_PAIRS,
            new_requests=[new for new, _ in self._new],
            new_indptr=_pointers([len(ids) for _, ids in self._new]) if self._new else NO_ROWS,
            new_token_ids=np.concatenate([ids for _, ids in self._new]) if self._new else EMPTY,
            num_drafts=drafts,
        )

    def _pooled_rows(self, slots: Index, ends: Bools) -> list[int]:
        """Rows of hidden states that are pooled. ``ends``: the rows with a prompt's last token."""
        running = self._running
        return [
            row
            for row, slot in enumerate(slots.tolist())
            if slot in running.pooling
            and (ends[row] or running.at(slot).pooling is not Pooling.LAST)
        ]

    def _flag_prompt_logprobs(self, flags: np.ndarray, slots: Index, starts: Int32) -> None:
        for row, slot in enumerate(slots.tolist()):
            if (
                slot in self._running.prompt_logprob_slots
                and starts[row] < self._running.at(slot).prompt_len - 1
            ):
                flags[row] |= PROMPT_LOGPROBS

    def _block_columns(self, num_rows: int) -> tuple[Int32, Int32, Int32]:
        block_starts = np.zeros(num_rows, dtype=np.int32)
        indptr = np.zeros(num_rows + 1, dtype=np.int32)
        if not self._blocks:
            return block_starts, indptr, EMPTY
        rows, indices, counts = self._grown[0]
        if len(self._grown) > 1:
            rows, indices, counts = map(np.concatenate, zip(*self._grown))
        block_starts[rows] = indices
        indptr[1:][rows] = counts
        return block_starts, indptr.cumsum(dtype=np.int32), int32(self._blocks)


def _pointers(lengths: list[int]) -> Int32:
    return int32(np.cumsum([0, *lengths]))
