"""DeviceStep: how one step is computed on a device, in launches that wait for nothing.

Drawn tokens go from the sampler into the histories on the device, where the next step's first
kernel finds them: no step needs what an earlier one drew on the host. ``compute`` is the same
sequence of launches for equal numbers of rows and tokens, at fixed addresses, so that it can be
captured as a graph.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.core.plan import SAMPLE, StepPlan
from octavo.model.batch import ForwardBatch
from octavo.model.decoder import Model
from octavo.ops.triton.masks import keep_allowed
from octavo.ops.triton.step import (
    BLOCK_INDEX,
    COUNT,
    DRAWS,
    FIRST_BLOCK,
    FIRST_TOKEN,
    NEW_BLOCKS,
    RECORD,
    SLOT,
    START,
    StepBuffers,
    begin_step,
    place,
)
from octavo.worker.batch import Rows
from octavo.worker.device_sampler import DeviceSampler
from octavo.worker.device_tables import DeviceTables
from octavo.worker.graphs import Shape
from octavo.worker.guessing import Guessing
from octavo.worker.reports import Report
from octavo.worker.slots import Slots
from octavo.worker.staging import Uploads

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]

# Logits are computed for so many bytes of rows at a time.
LOGITS_BYTES = 256 << 20
# Ids of new requests are uploaded so many at a time, or one request where it has more.
PLACED_IDS = 1 << 18


class DeviceStep:
    """``slots`` is the host's side of the state, ``tables`` the device's."""

    def __init__(
        self,
        model: Model,
        cache: list[Tensor],
        slots: Slots,
        tables: DeviceTables,
        max_rows: int,
        max_tokens: int,
        device: torch.device,
        guessing: Guessing | None = None,
    ) -> None:
        """``guessing``: rows may bring guesses."""
        self.guessing = guessing
        self.model = model
        self.cache = cache
        self.slots = slots
        self.tables = tables
        self.max_rows = max_rows
        self.max_tokens = max_tokens
        self.sampler = DeviceSampler(tables, slots, max_rows)
        # With guesses: what was drawn, how much of it each row keeps, and how many guesses it had.
        told = max_rows if guessing is None else 3 * max_rows
        self.tokens = torch.zeros(told, dtype=torch.int32, device=device)
        self.logit_rows = max(1, LOGITS_BYTES // (4 * slots.vocab_size))
        # Of steps whose draws wait for masks: the hidden states that their forward leaves, and the
        # row of ``_masks`` for each row of the step (-1: none), then those rows.
        self.last = torch.zeros(max_rows, model.spec.hidden_size, dtype=model.dtype, device=device)
        self._mask_words = -(-slots.vocab_size // 32)
        self._masks = torch.zeros(
            max_rows * (1 + self._mask_words), dtype=torch.int32, device=device
        )
        self._mask_uploads: Uploads | None = None  # made when the first masks come
        new_blocks = max_rows * slots.max_blocks
        self._buffers = StepBuffers.allocate(
            max_rows, max_tokens, slots.max_blocks, new_blocks, device
        )
        self._step_uploads = Uploads(max_rows * RECORD + new_blocks, device)
        placed = max(PLACED_IDS, slots.max_len + 1) + 2 * max_rows + 1
        self._place_uploads = Uploads(placed, device)
        self._placed = torch.zeros(placed, dtype=torch.int32, device=device)

    # ---- what a plan changes before it computes ----

    def place(self, plan: StepPlan) -> None:
        """The ids and parameters of new requests."""
        if not plan.new_requests:
            return
        slots = np.array([new.slot for new in plan.new_requests], dtype=np.int32)
        self._place(self.tables.history, slots, plan.new_indptr, plan.new_token_ids)
        self.sampler.place(slots)
        if self.guessing is not None:
            pairs = np.stack([slots, np.diff(plan.new_indptr)]).astype(np.int32)
            sent = self._place_uploads.send(pairs.reshape(-1), self._placed).view(2, -1)
            self.tables.lengths.index_copy_(0, sent[0].long(), sent[1])

    def restore_tables(self, plan: StepPlan) -> None:
        """After a failed step: rows of later plans that continue from its own find the blocks that
        it brought, and no other request's."""
        slots = plan.slots
        counts = self.slots.num_blocks[slots]
        width = np.arange(self.slots.max_blocks) < counts[:, None]
        ids = self.slots.block_table_host[slots][width]
        bounds = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        self._place(self.tables.block_table, slots, bounds, ids)

    def _place(self, table: Tensor, slots: Int32, bounds: Int32, ids: Int32) -> None:
        """Row ``slots[i]`` of ``table`` begins with ids[bounds[i] : bounds[i + 1]]."""
        first = 0
        while first < len(slots):
            last = first + 1
            while last < len(slots) and bounds[last + 1] - bounds[first] <= PLACED_IDS:
                last += 1
            own = bounds[first : last + 1] - bounds[first]
            columns = [slots[first:last], own, ids[bounds[first] : bounds[last]]]
            sent = self._place_uploads.send(np.concatenate(columns), self._placed)
            count = last - first
            place(table, sent[2 * count + 1 :], sent[count : 2 * count + 1], sent[:count])
            first = last

    def copy_blocks(self, plan: StepPlan) -> None:
        """Copies on write; sources and destinations of a plan are disjoint."""
        if len(plan.copies):
            pairs = self._place_uploads.send(plan.copies.reshape(-1), self._placed)
            self.model.copy_blocks(self.cache, pairs.view(-1, 2).to(torch.int64))

    def stage(self, plan: StepPlan, rows: Rows, shape: Shape) -> Int32:
        """Uploads the plan's rows, padded to ``shape``. Returns where each row is now, [n]. Raises
        ValueError for a shape beyond the buffers."""
        too_many = shape.num_tokens > self.max_rows if shape.queries > 1 else False
        if too_many or shape.num_rows > self.max_rows or shape.num_tokens > self.max_tokens:
            raise ValueError(
                f"step {plan.step} has {shape.num_rows} rows and {shape.num_tokens} tokens; the "
                f"worker holds {self.max_rows} rows and {self.max_tokens} tokens"
            )
        n, decode = len(rows.slots), rows.decode_rows
        places = np.arange(n, dtype=np.int32)
        places[decode:] += shape.decode_rows - decode
        records = _padding(shape, int(rows.num_tokens[decode:].sum()), n - decode)
        counts = rows.num_tokens  # with guesses: one more than there may be
        records[places, SLOT] = rows.slots
        records[places, START] = rows.starts
        records[places, COUNT] = counts
        first = np.cumsum(counts) - counts
        first[decode:] += shape.decode_rows - decode
        records[places, FIRST_TOKEN] = first
        records[places, DRAWS] = rows.flags & SAMPLE
        if len(plan.block_ids):
            order = rows.plan_rows
            records[places, BLOCK_INDEX] = plan.block_starts[order]
            records[places, NEW_BLOCKS] = np.diff(plan.block_indptr)[order]
            records[places, FIRST_BLOCK] = plan.block_indptr[order]
        values = np.concatenate([records.reshape(-1), plan.block_ids])
        self._step_uploads.send(values, self._buffers.staged)
        return places

    # ---- computing ----

    def begin(self, shape: Shape) -> ForwardBatch:
        """Enqueues what fills the batch of the staged rows."""
        buffers, tables = self._buffers, self.tables
        n, total = shape.num_rows, shape.num_tokens
        size, queries = self.slots.block_size, shape.queries
        if queries > 1:
            assert self.guessing is not None
            self.guessing.begin(buffers, n, queries, tables, self.tokens[total + n :], size)
        else:
            lengths = tables.lengths if self.guessing is not None else None
            begin_step(buffers, n, tables.history, tables.block_table, size, lengths)
        return ForwardBatch(
            token_ids=buffers.token_ids[:total],
            positions=buffers.positions[:total],
            slot_mapping=buffers.slot_mapping[:total],
            query_starts_host=[],
            seq_lens_host=[],
            query_starts=buffers.query_starts[: n + 1],
            seq_lens=buffers.seq_lens[:n],
            block_tables=buffers.block_tables[:n],
            block_size=size,
            decode_rows=shape.decode_rows if queries == 1 else 0,
            logit_rows=buffers.logit_rows[:n],
            queries=queries,
        )

    def forward(self, shape: Shape) -> Tensor:
        """Hidden states of each row's last token."""
        batch = self.begin(shape)
        if shape.prompt_rows:
            return self.model.forward_last(batch, self.cache)
        return self.model.forward(batch, self.cache)

    def compute_last(self, shape: Shape) -> None:
        """The forward alone of the staged rows, into ``last``."""
        self.last[: shape.num_rows].copy_(self.forward(shape))

    def forward_all(self, shape: Shape) -> tuple[Tensor, Tensor]:
        """Hidden states of all tokens, and of each row's last."""
        batch = self.begin(shape)
        hidden = self.model.forward(batch, self.cache)
        return hidden, hidden[batch.logit_rows]

    def draw(self, last: Tensor) -> None:
        """Draws for the staged rows that ask, from the hidden states of their last tokens, into
        ``tokens`` and the histories."""
        for start in range(0, len(last), self.logit_rows):
            part = slice(start, min(start + self.logit_rows, len(last)))
            logits = self.model.logits(last[part])
            slots, positions = self.draw_columns(part)
            self.sampler.draw(logits, slots, positions, self.tokens[part])

    def send_masks(self, places: Int32, masks: Int32, num_rows: int) -> None:
        """Enqueues the upload of ``masks`` (int32 [k, words]) for the staged rows ``places``, of
        ``num_rows``; ``draw_special`` applies them."""
        if self._mask_uploads is None:
            self._mask_uploads = Uploads(len(self._masks), self._masks.device)
        index = np.full(num_rows, -1, dtype=np.int32)
        index[places] = np.arange(len(places))
        self._mask_uploads.send(np.concatenate([index, masks.reshape(-1)]), self._masks)

    def masks_of(self, num_rows: int) -> Tensor:
        """What ``send_masks`` has filled for so many rows."""
        return self._masks[: num_rows * (1 + self._mask_words)]

    def draw_special(
        self, last: Tensor, reporting: Int64, wanted: Int32, masked: bool = False
    ) -> Report | None:
        """``draw`` for steps in which some rows have edits, or masks (``masked``: which have been
        sent), or report log-probabilities: the rows ``reporting``, ascending, and ``wanted``
        alternatives of each."""
        parts: list[tuple[Tensor, ...]] = []
        most = int(wanted.max()) if len(reporting) else 0
        for start in range(0, len(last), self.logit_rows):
            part = slice(start, min(start + self.logit_rows, len(last)))
            logits = self.model.logits(last[part])
            own = reporting[(reporting >= part.start) & (reporting < part.stop)] - start
            index = torch.from_numpy(own).to(last.device, non_blocking=True)
            raw = logits[index]
            tokens = self.tokens[part]
            if masked:
                rows, words = len(last), self._mask_words
                masks = self._masks[rows : rows * (1 + words)].view(rows, words)
                keep_allowed(logits, self._masks[part], masks)
            self.sampler.draw_edited(logits, *self.draw_columns(part), tokens)
            if len(own):
                parts.append(self.sampler.logprobs(raw, tokens[index], most))
        if not parts:
            return None
        ids, values, ranks = map(torch.cat, zip(*parts))
        return Report.fetch(ids, values, ranks, wanted)

    def score_prompt(self, slot: int, low: int, high: int, hidden: Tensor, shift: int) -> Report:
        """Of the tokens low + 1 .. high of a slot's prompt; hidden[shift + i] is of token i."""
        logits = self.model.logits(hidden[shift + low : shift + high])
        following = self.tables.history[slot, low + 1 : high + 1]
        k = int(self.slots.prompt_logprobs[slot])
        ids, values, ranks = self.sampler.logprobs(logits, following, k)
        return Report.fetch(ids, values, ranks, np.full(high - low, k, dtype=np.int32))

    def draw_columns(self, part: slice) -> tuple[Tensor, Tensor]:
        """Slots (-1: does not draw) and positions of the staged rows, int32."""
        return self._buffers.draw_slots[part], self._buffers.draw_positions[part]

    def compute(self, shape: Shape) -> None:
        """A whole step of the staged rows, its draws included."""
        self.draw(self.forward(shape))
        if shape.queries > 1:
            assert self.guessing is not None
            n, total = shape.num_rows, shape.num_tokens
            told, guessed = self.tokens[total : total + n], self.tokens[total + n :]
            self.guessing.accept(
                self._buffers, n, shape.queries, self.tokens, guessed, self.tables, told
            )

    def rehearse(self, shape: Shape) -> None:
        """A step of padding: takes the time and memory of the linears of a real one."""
        self._step_uploads.send(_padding(shape, 0, 0).reshape(-1), self._buffers.staged)
        self.compute(shape)

    def rehearse_reports(self, num_rows: int, num_tokens: int, k: int) -> None:
        """Log-probabilities of the draws of ``num_rows`` rows of padding and of the tokens of a
        prompt, with ``k`` alternatives (-1: 20), after a step of ``num_tokens``."""
        shape, k = Shape(num_rows), 20 if k < 0 else k
        self._step_uploads.send(_padding(shape, 0, 0).reshape(-1), self._buffers.staged)
        last = self.model.forward(self.begin(shape), self.cache)
        hidden = last.new_zeros(max(num_tokens, num_rows), last.shape[1])
        everyone = np.arange(num_rows, dtype=np.int64)
        self.draw_special(hidden[:num_rows], everyone, np.full(num_rows, k, dtype=np.int32))
        logits = self.model.logits(hidden[: self.logit_rows])
        self.sampler.logprobs(logits, self._buffers.token_ids[: len(logits)], k)


def _padding(shape: Shape, num_tokens: int, num_rows: int) -> Int32:
    """Records of a step of padding: rows of slot -1. Of the rows with prompts the first
    ``num_rows``, with ``num_tokens``, will be filled in; the last has the tokens that remain."""
    decode = shape.decode_rows
    records = np.zeros((shape.num_rows, RECORD), dtype=np.int32)
    records[:, SLOT] = -1
    records[:decode, COUNT] = 1
    records[:decode, FIRST_TOKEN] = np.arange(decode)
    records[decode + num_rows :, FIRST_TOKEN] = decode + num_tokens
    if shape.prompt_rows > num_rows:
        records[-1, COUNT] = shape.prompt_tokens - num_tokens
    return records
