"""Slots: all that outlives a step, by slot, in persistent arrays.

A request keeps one slot from its placement until a plan frees it. Everything here changes only
through ``apply`` (what a plan says) and ``append`` (what the sampler drew), in plan order.

Arrays are NumPy views of torch memory on the host: a kernel reads the tensor, the bookkeeping the
array, and neither copies. A large table costs memory only where it was written (pages of zeros are
not committed), so the [max_slots, vocab] tables are free for requests without penalties.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.core.plan import SAMPLE, NewRequest, StepPlan, laid_out
from octavo.grammar.grammars import Grammars
from octavo.ops.needs import EDITS, GRAMMAR, LOGPROBS, MIN_P, PENALTIES, RANDOM, TOP_K, TOP_P
from octavo.types import Pooling, SamplingParams
from octavo.worker.constraints import Constraints

# Temperatures below this draw the most likely token. Above 1e-5, where greedy begins by definition,
# the exact law differs from it only for logits closer than about 0.01 (docs/sampling.md).
NEARLY_GREEDY = 1e-3
# Beyond these a penalty already decides everything; further out float32 would overflow.
REPETITION_RANGE = (1e-10, 1e10)


@dataclass(slots=True)
class Edits:
    """What one slot bans or favours, as int64 ids on the device; None where it is not used."""

    allowed: Tensor | None  # [a] only these may be drawn
    bias_ids: Tensor | None  # [b]
    bias: Tensor | None  # float32 [b]
    min_stop_ids: Tensor | None  # [s] banned until min_tokens are out
    word_prefixes: Tensor | None  # [w, m] right-aligned, padded on the left with -1
    word_lengths: Tensor | None  # [w] ids in the prefix
    word_ends: Tensor | None  # [w] the id that would complete the word


class Slots:
    """State of up to ``max_slots`` requests of at most ``max_len`` tokens.

    ``history``: int32 [max_slots, max_len + 1] token ids; ``length[s]`` of them are known.
    ``block_table``: int32 [max_slots, max_blocks]; the first ``num_blocks[s]`` entries are set.
    Invariant: a row of a plan only reads tokens before ``length`` and blocks before ``num_blocks``.
    """

    def __init__(
        self,
        max_slots: int,
        max_len: int,
        block_size: int,
        vocab_size: int,
        grammars: Grammars | None = None,
        follows: bool = False,
        margin: int = 0,
    ) -> None:
        """``follows``: another rank draws what grammars allow. ``margin``: places that tables have
        behind the longest text."""
        self.max_slots = max_slots
        self.max_len = max_len
        self.block_size = block_size
        self.vocab_size = vocab_size
        self.max_blocks = -(-(max_len + 1 + margin) // block_size)

        def table(columns: int, dtype: type) -> Tensor:
            """Of zeros that nobody has written: torch's own would write them."""
            return torch.from_numpy(np.zeros((max_slots, columns), dtype=dtype))

        self.history = table(max_len + 1, np.int32)
        self.block_table = table(self.max_blocks, np.int32)
        self.output_counts = table(vocab_size, np.int32)
        self.prompt_mask = table(vocab_size, np.bool_)
        self.history_host: NDArray[np.int32] = self.history.numpy()
        self.block_table_host: NDArray[np.int32] = self.block_table.numpy()

        def column(dtype: type) -> NDArray[Any]:
            return np.zeros(max_slots, dtype=dtype)

        self.epoch = column(np.int64)  # rises whenever a request leaves the slot
        self.length = column(np.int32)
        self.num_blocks = column(np.int32)
        self.prompt_len = column(np.int32)
        self.needs = column(np.uint8)
        self.temperature = column(np.float32)
        self.top_k = column(np.int64)
        self.top_p = column(np.float32)
        self.min_p = column(np.float32)
        self.repetition = column(np.float32)
        self.frequency = column(np.float32)
        self.presence = column(np.float32)
        self.seed_low = column(np.int32)
        self.seed_high = column(np.int32)
        self.min_tokens = column(np.int32)
        self.logprobs = column(np.int32)  # the most likely k; read only with LOGPROBS
        self.prompt_logprobs = column(np.int32)
        self.edits: dict[int, Edits] = {}
        self.pooling: dict[int, Pooling] = {}  # of slots whose prompt's vector is wanted
        self.constraints = Constraints(max_slots, vocab_size, grammars)
        self._follows = follows

    def apply(self, plan: StepPlan) -> None:
        """Frees slots, places new requests and sets block table entries, in this order.

        Raises ValueError when a row reaches beyond the known tokens or its blocks; all of the
        plan's changes have been made by then, so that later plans find consistent slots.
        """
        if len(plan.freed_slots):
            self.free(plan.freed_slots)
        for new, start, end in zip(plan.new_requests, plan.new_indptr[:-1], plan.new_indptr[1:]):
            self._place(new, plan.new_token_ids[start:end])
        if len(plan.block_ids):
            self._set_blocks(plan)
        self._check_rows(plan)

    def starts(self, plan: StepPlan) -> NDArray[np.int32]:
        """[n] where each row begins: those that draw, where their known tokens end. A plan made
        before earlier guesses were compared says only how far that can be."""
        if plan.num_drafts is None:
            return plan.starts
        ends = self.length[plan.slots] - plan.num_known
        return np.where((plan.flags & SAMPLE) != 0, ends, plan.starts)

    def write_guesses(
        self, slots: NDArray[np.int32], counts: NDArray[np.int32], ids: NDArray[np.int32]
    ) -> None:
        """Puts ``counts[i]`` ids of each row of ``ids`` [r, k] behind the known tokens of a slot,
        which they do not become."""
        each, places = laid_out(counts)
        self.history_host[slots[each], self.length[slots[each]] + places] = ids[each, places]

    def append_runs(
        self,
        slots: NDArray[np.int32],
        positions: NDArray[np.int32],
        counts: NDArray[np.int32],
        runs: NDArray[np.int64],
    ) -> None:
        """As ``append``, for ``counts[i]`` tokens of each row of ``runs`` [r, k + 1] from
        ``positions[i]`` on. No slot counts its output for penalties."""
        each, places = laid_out(counts)
        self.history_host[slots[each], positions[each] + places] = runs[each, places]
        self.length[slots] = positions + counts

    def append(
        self, slots: NDArray[np.int32], positions: NDArray[np.int32], tokens: Tensor
    ) -> None:
        """Puts drawn ``tokens`` (int64 [r]) at ``positions`` of the histories of ``slots``."""
        drawn = tokens.numpy()
        self.history_host[slots, positions] = drawn
        self.length[slots] = positions + 1
        counted = (self.needs[slots] & PENALTIES) != 0
        if counted.any():
            self.output_counts.numpy()[slots[counted], drawn[counted]] += 1

    def skip(self, plan: StepPlan) -> None:
        """After a failed step: lets rows of later plans that continue from it still run.

        The engine fails these requests and drops what such rows draw, but the other rows of those
        plans must not suffer.
        """
        drawing = (plan.flags & SAMPLE) != 0
        slots = plan.slots[drawing]
        ends = np.minimum((plan.starts + plan.num_tokens + 1)[drawing], self.max_len + 1)
        self.length[slots] = np.maximum(self.length[slots], ends)

    def free(self, slots: NDArray[np.int32]) -> None:
        """Forgets the requests in ``slots``; ids and counts stay until others are placed there."""
        self.epoch[slots] += 1
        self.length[slots] = 0
        self.num_blocks[slots] = 0
        self.needs[slots] = 0
        if self.edits or self.pooling or self.constraints:
            for slot in slots.tolist():
                self.edits.pop(slot, None)
                self.pooling.pop(slot, None)
                self.constraints.free(slot)

    def _place(self, new: NewRequest, ids: NDArray[np.int32]) -> None:
        slot, params = new.slot, new.params
        self.history_host[slot, : len(ids)] = ids
        self.length[slot] = len(ids)
        self.num_blocks[slot] = 0
        self.prompt_len[slot] = new.prompt_len
        self.temperature[slot] = params.temperature
        self.top_k[slot] = params.top_k
        self.top_p[slot] = params.top_p
        self.min_p[slot] = params.min_p
        self.repetition[slot] = np.clip(params.repetition_penalty, *REPETITION_RANGE)
        self.frequency[slot] = params.frequency_penalty
        self.presence[slot] = params.presence_penalty
        words = np.array([new.seed & (2**64 - 1)], dtype="<u8").view("<i4")
        self.seed_low[slot], self.seed_high[slot] = words
        self.min_tokens[slot] = params.min_tokens
        self.logprobs[slot] = self._num_logprobs(params.logprobs)
        self.prompt_logprobs[slot] = self._num_logprobs(params.prompt_logprobs)
        self.edits.pop(slot, None)
        if new.pooling is not None:
            self.pooling[slot] = new.pooling
        edits = _edits(new)
        if edits is not None:
            self.edits[slot] = edits
        self.needs[slot] = self._needs(params, edits is not None)
        if new.grammar:
            self.needs[slot] |= GRAMMAR
            if not self._follows:
                self.constraints.place(new, ids)
        if self.needs[slot] & PENALTIES:
            self._count(slot, ids[: new.prompt_len], ids[new.prompt_len :])

    def _num_logprobs(self, asked: int | None) -> int:
        return self.vocab_size if asked == -1 else min(asked or 0, self.vocab_size)

    def _needs(self, params: SamplingParams, edited: bool) -> int:
        needs = EDITS if edited else 0
        if params.logprobs is not None:
            needs |= LOGPROBS
        penalties = (params.frequency_penalty, params.presence_penalty)
        if params.repetition_penalty != 1.0 or any(penalties):
            needs |= PENALTIES
        if params.temperature < NEARLY_GREEDY or params.top_k == 1:
            return needs
        needs |= RANDOM
        if 0 < params.top_k < self.vocab_size:
            needs |= TOP_K
        if params.top_p < 1.0:
            needs |= TOP_P
        return needs | (MIN_P if params.min_p > 0.0 else 0)

    def _count(self, slot: int, prompt: NDArray[np.int32], output: NDArray[np.int32]) -> None:
        mask = self.prompt_mask.numpy()[slot]
        mask[:] = False
        mask[prompt] = True
        counts = self.output_counts.numpy()[slot]
        counts[:] = 0
        np.add.at(counts, output, 1)

    def _set_blocks(self, plan: StepPlan) -> None:
        counts = np.diff(plan.block_indptr)
        rows = np.repeat(np.arange(len(counts)), counts)
        column = np.arange(len(plan.block_ids)) - plan.block_indptr[rows] + plan.block_starts[rows]
        self.block_table_host[plan.slots[rows], column] = plan.block_ids
        ends = np.where(counts > 0, plan.block_starts + counts, 0)
        self.num_blocks[plan.slots] = np.maximum(self.num_blocks[plan.slots], ends)

    def _check_rows(self, plan: StepPlan) -> None:
        ends = plan.starts + plan.num_tokens
        needed, known = plan.starts + plan.num_known, self.length[plan.slots]
        if plan.num_drafts is not None:  # where rows draw, what is known is what they compute
            needed = np.where((plan.flags & SAMPLE) != 0, plan.num_known, needed)
        if (needed > known).any():
            row = int((needed > known).argmax())
            raise ValueError(
                f"row {row} of step {plan.step} computes up to token {needed[row]} of slot "
                f"{plan.slots[row]}, which has {known[row]}"
            )
        places = self.num_blocks[plan.slots] * self.block_size
        if (ends > places).any():
            row = int((ends > places).argmax())
            raise ValueError(
                f"row {row} of step {plan.step} writes {ends[row]} tokens to slot "
                f"{plan.slots[row]}, whose blocks hold {places[row]}"
            )


def _edits(new: NewRequest) -> Edits | None:
    params = new.params
    stops = new.min_stop_ids if params.min_tokens > 0 else []
    bias = params.logit_bias or {}
    if not (params.allowed_token_ids or bias or stops or new.bad_words):
        return None

    def ids(values: list[int]) -> Tensor | None:
        return torch.tensor(values, dtype=torch.int64) if values else None

    prefixes = lengths = None
    if new.bad_words:
        longest = max(len(word) for word in new.bad_words) - 1
        padded = [[-1] * (longest + 1 - len(word)) + word[:-1] for word in new.bad_words]
        prefixes = torch.tensor(padded, dtype=torch.int64).view(len(padded), longest)
        lengths = ids([len(word) - 1 for word in new.bad_words])
    return Edits(
        allowed=ids(params.allowed_token_ids or []),
        bias_ids=ids([int(token) for token in bias]),
        bias=torch.tensor(list(bias.values()), dtype=torch.float32) if bias else None,
        min_stop_ids=ids(stops),
        word_prefixes=prefixes,
        word_lengths=lengths,
        word_ends=ids([word[-1] for word in new.bad_words]),
    )
