"""Drafts: guesses that a smaller model computes, token by token.

It draws with the noise of the target's own draws: where both models think alike, they draw alike,
also at high temperatures.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.core.plan import StepPlan
from octavo.model.batch import ForwardBatch
from octavo.model.decoder import Model
from octavo.ops.needs import GRAMMAR, LOGPROBS
from octavo.types import ConfigError
from octavo.worker.batch import BatchBuilder
from octavo.worker.draws import Drawer
from octavo.worker.slots import Slots
from octavo.worker.speculative.proposer import Silent

Int32 = NDArray[np.int32]
# A guess needs no log-probabilities; what a grammar bans, the target refuses.
IGNORED = LOGPROBS | GRAMMAR


class Draft(Protocol):
    """What guesses. All tokens of a row before the first one it is called with are computed."""

    def apply(self, plan: StepPlan) -> None:
        """As a proposer's."""

    def prepare(self, slots: Int32) -> Tensor:
        """Computes all that is known of the slots. Returns hidden states of the last token of
        each, [r, hidden]."""

    def forward(self, batch: ForwardBatch) -> Tensor:
        """Hidden states of the batch's ``logit_rows``, [r, hidden]."""

    @property
    def model(self) -> Model:
        """For logits."""

    @property
    def max_len(self) -> int:
        """Positions it knows."""


class DraftProposer(Silent):
    def __init__(self, draft: Draft, slots: Slots, batches: BatchBuilder, drawer: Drawer) -> None:
        """``batches``: with buffers that are free before a step. ``drawer``: of the draft, for
        which what is IGNORED does not count."""
        self._draft = draft
        self._slots = slots
        self._batches = batches
        self._drawer = drawer

    def apply(self, plan: StepPlan) -> None:
        self._draft.apply(plan)

    def propose(self, slots: Int32, most: Int32) -> tuple[Int32, Int32]:
        ids = np.zeros((len(slots), int(most.max(initial=0))), dtype=np.int32)
        lengths = self._slots.length[slots]
        most = np.clip(self._draft.max_len - lengths, 0, most).astype(np.int32)
        rows = most.nonzero()[0]
        if not len(rows):
            return most, ids
        hidden = self._draft.prepare(slots[rows])
        for place in range(int(most.max())):
            if place:
                rows = rows[most[rows] > place]
                starts = lengths[rows] + place - 1
                batch = self._batches.fill(slots[rows], starts, np.ones_like(starts))
                hidden = self._draft.forward(batch)
            positions = lengths[rows] + place
            drawn = self._drawer.choose(hidden, slots[rows], positions).tokens.numpy()
            ids[rows, place] = self._slots.history_host[slots[rows], positions] = drawn
        return most, ids


class FirstLayers(Silent):
    """The target's own first layers, with the target's own keys and values: nothing has to be
    computed twice but the guesses."""

    def __init__(
        self,
        model: Model,
        cache: list[Tensor],
        num_layers: int,
        slots: Slots,
        batches: BatchBuilder,
    ) -> None:
        """Raises ConfigError where the model has no more layers than these."""
        if num_layers >= len(model.layers):
            raise ConfigError(
                f"speculation: draft_layers {num_layers}, the model has {len(model.layers)}: use 1 "
                f"to {len(model.layers) - 1}, a quarter of them to begin with"
            )
        self.model = model
        self.max_len = slots.max_len
        self._cache, self._num_layers = cache, num_layers
        self._slots, self._batches = slots, batches

    def prepare(self, slots: Int32) -> Tensor:
        starts = self._slots.length[slots] - 1
        return self.forward(self._batches.fill(slots, starts, np.ones_like(starts)))

    def forward(self, batch: ForwardBatch) -> Tensor:
        return self.model.forward_first(batch, self._cache, self._num_layers)


class DraftModel:
    """A model of its own, whose keys and values lie in blocks of the target's numbers.

    It computes a request only when guesses are wanted of it, then all that is missing. Blocks that
    it has filled with known tokens are marked, so that requests that share them need not.
    """

    def __init__(self, model: Model, num_blocks: int, slots: Slots, batches: BatchBuilder) -> None:
        self.model = model
        self.max_len = min(slots.max_len, model.spec.max_position)
        self._cache = model.allocate_cache(num_blocks, slots.block_size)
        self._slots, self._batches = slots, batches
        self._filled = np.zeros(num_blocks, dtype=np.bool_)
        self._computed = np.zeros(slots.max_slots, dtype=np.int32)
        self._epoch = np.full(slots.max_slots, -1, dtype=np.int64)  # whose ``_computed`` are

    def apply(self, plan: StepPlan) -> None:
        """Blocks that are new to a row, or copied for it, hold nothing of ours yet."""
        if not len(plan.block_ids):
            return
        counts = np.diff(plan.block_indptr)
        rows = np.repeat(np.arange(len(counts)), counts)
        index = np.arange(len(plan.block_ids)) - plan.block_indptr[rows] + plan.block_starts[rows]
        # A new request's first blocks may be another's: those before its first token.
        is_new = np.isin(plan.slots, [new.slot for new in plan.new_requests])
        shared = np.where(is_new, plan.starts // self._slots.block_size, 0)
        self._filled[plan.block_ids[index >= shared[rows]]] = False

    def prepare(self, slots: Int32) -> Tensor:
        state, size = self._slots, self._slots.block_size
        lengths = state.length[slots]
        for slot in slots[self._epoch[slots] != state.epoch[slots]].tolist():
            blocks = state.block_table_host[slot, : (state.length[slot] - 1) // size]
            missing = np.flatnonzero(~self._filled[blocks])
            self._computed[slot] = size * (int(missing[0]) if len(missing) else len(blocks))
            self._epoch[slot] = state.epoch[slot]
        # Guesses that were wrong lie at the last token, or behind it.
        starts = np.minimum(self._computed[slots], lengths - 1)
        hidden = self._compute(slots, starts, lengths)
        self._computed[slots] = lengths
        self._mark(slots, starts, lengths)
        return hidden

    def _compute(self, slots: Int32, starts: Int32, ends: Int32) -> Tensor:
        """Tokens ``starts`` to ``ends`` of each slot, in as many steps as the buffers need."""
        last = torch.empty(len(slots), self.model.spec.hidden_size, dtype=self.model.dtype)
        while True:
            counts = ends - starts
            left = counts.nonzero()[0]
            if not len(left):
                return last
            before = np.cumsum(counts[left]) - counts[left]
            now = np.clip(self._batches.max_tokens - before, 0, counts[left]).astype(np.int32)
            order = np.argsort(now, kind="stable")
            rows, now = left[order[now[order] > 0]], now[order[now[order] > 0]]
            batch = self._batches.fill(slots[rows], starts[rows], now)
            last[torch.from_numpy(rows)] = self.model.forward_last(batch, self._cache)
            starts = starts.copy()
            starts[rows] += now

    def _mark(self, slots: Int32, starts: Int32, ends: Int32) -> None:
        """Blocks full of known tokens."""
        size = self._slots.block_size
        first, end = starts // size, ends // size
        for row in (end > first).nonzero()[0].tolist():
            blocks = self._slots.block_table_host[slots[row], first[row] : end[row]]
            self._filled[blocks] = True

    def forward(self, batch: ForwardBatch) -> Tensor:
        return self.model.forward_last(batch, self._cache)


def check_vocabulary(draft: Model, target: Model, path: Path) -> None:
    """Raises ConfigError where their tokens cannot be the same."""
    own, wanted = draft.spec.vocab_size, target.spec.vocab_size
    if own != wanted:
        raise ConfigError(
            f"speculation: {path} has a vocabulary of {own:,} tokens, the model one of {wanted:,}; "
            "the draft must have the same: use a smaller model of the same family, or ngram"
        )
