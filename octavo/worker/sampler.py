"""From logits to drawn tokens: which operation each row needs, in the order of docs/sampling.md.

Batches in which no row needs anything take one argmax. Otherwise the rows that ask for something
are processed apart from the others, each operation on just those rows that use it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.core.plan import Logprobs
from octavo.ops import masks, sampling
from octavo.ops.needs import (
    EDITS,
    GRAMMAR,
    LOGPROBS,
    MIN_P,
    PENALTIES,
    RANDOM,
    TOP_K,
    TOP_P,
    TRUNCATION,
)
from octavo.worker.slots import Slots

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]
NEG_INF = float("-inf")
# Rows that need processing are taken so many bytes of logits at a time: the temporaries of a block
# stay in the cache and are handed from one operation to the next, while whole ones would be
# returned to the system and faulted in again.
BLOCK_BYTES = 1 << 20


@dataclass(slots=True)
class Drawn:
    """What some rows of logits gave."""

    tokens: Tensor  # int64 [r]
    rows: Int64  # of these, the rows that asked for log-probabilities
    logprobs: Logprobs | None  # of those rows; None where there are none


def only_tokens(tokens: Tensor) -> Drawn:
    """tokens: int64 [r], of rows that asked for nothing else."""
    return Drawn(tokens, np.zeros(0, dtype=np.int64), None)


def join(parts: list[Drawn]) -> Drawn:
    """The draws of consecutive slices of rows as one."""
    if len(parts) == 1:
        return parts[0]
    starts = np.cumsum([0, *(len(part.tokens) for part in parts)])
    found = [part.logprobs for part in parts if part.logprobs is not None]
    return Drawn(
        torch.cat([part.tokens for part in parts]),
        np.concatenate([part.rows + start for part, start in zip(parts, starts)]),
        stack(found) if found else None,
    )


class Sampler:
    """Draws for rows of logits, by the parameters in their slots."""

    def __init__(self, slots: Slots) -> None:
        self.slots = slots

    def sample(self, logits: Tensor, slots: Int32, positions: Int32, ignored: int = 0) -> Drawn:
        """Draws the tokens at ``positions`` of ``slots``, whose masks are filled where they have a
        grammar. logits: float32 [r, V], overwritten. ``ignored``: needs that are passed over."""
        needs = self.slots.needs[slots] & ~np.uint8(ignored)
        if not needs.any():
            return only_tokens(sampling.most_likely(logits))
        size = max(1, BLOCK_BYTES // (4 * logits.shape[-1]))
        blocks = [slice(start, start + size) for start in range(0, len(slots), size)]
        return join([self._sample(logits[b], slots[b], positions[b], needs[b]) for b in blocks])

    def _sample(
        self, logits: Tensor, slots: Int32, positions: Int32, needs: NDArray[np.uint8]
    ) -> Drawn:
        asked = int(np.bitwise_or.reduce(needs))
        reporting = (needs & LOGPROBS).nonzero()[0]
        raw = logits[_index(reporting)].log_softmax(-1) if len(reporting) else None
        if asked & GRAMMAR:
            self._constrain(logits, slots, (needs & GRAMMAR).nonzero()[0])
        if asked & EDITS:
            self._edit(logits, slots, positions, (needs & EDITS).nonzero()[0])
        if asked & PENALTIES:
            self._penalise(logits, slots, (needs & PENALTIES).nonzero()[0])
        tokens = self._draw(logits, slots, positions, needs, asked)
        if raw is None:
            return Drawn(tokens, reporting, None)
        wanted = self.slots.logprobs[slots[reporting]]
        return Drawn(tokens, reporting, describe(raw, tokens[_index(reporting)], wanted))

    def _draw(
        self, logits: Tensor, slots: Int32, positions: Int32, needs: NDArray[np.uint8], asked: int
    ) -> Tensor:
        if not asked & RANDOM:
            return sampling.most_likely(logits)
        random = (needs & RANDOM) != 0
        if random.all():
            return self._draw_random(logits, slots, positions, needs)
        tokens = torch.zeros(len(slots), dtype=torch.int64, device=logits.device)
        rows = random.nonzero()[0]
        drawn = self._draw_random(logits[_index(rows)], slots[rows], positions[rows], needs[rows])
        tokens[_index(rows)] = drawn
        rest = _index((~random).nonzero()[0])
        tokens[rest] = sampling.most_likely(logits[rest])
        return tokens

    def _draw_random(
        self, logits: Tensor, slots: Int32, positions: Int32, needs: NDArray[np.uint8]
    ) -> Tensor:
        state = self.slots
        scale = torch.from_numpy(1.0 / state.temperature[slots])
        probs = logits.mul_(scale[:, None]).softmax(-1)
        keys = sampling.row_keys(
            _column(state.seed_low, slots),
            _column(state.seed_high, slots),
            torch.from_numpy(positions.astype(np.int32, copy=False)),
        )
        cut = (needs & TRUNCATION) != 0
        if not cut.any():
            return sampling.draw(probs, keys)
        if cut.all():
            return self._draw_cut(probs, slots, needs, keys)
        tokens = torch.zeros(len(slots), dtype=torch.int64, device=logits.device)
        rows, rest = cut.nonzero()[0], _index((~cut).nonzero()[0])
        index = _index(rows)
        own_keys = (keys[0][index], keys[1][index])
        tokens[index] = self._draw_cut(probs[index], slots[rows], needs[rows], own_keys)
        tokens[rest] = sampling.draw(probs[rest], (keys[0][rest], keys[1][rest]))
        return tokens

    def _draw_cut(
        self,
        probs: Tensor,
        slots: Int32,
        needs: NDArray[np.uint8],
        keys: tuple[Tensor, Tensor],
    ) -> Tensor:
        state = self.slots
        floor = torch.zeros(len(slots), dtype=torch.float32, device=probs.device)
        if (needs & MIN_P).any():
            floor = sampling.min_p_floor(probs, _column(state.min_p, slots))
        limited = (needs & TOP_K).nonzero()[0]
        if len(limited):
            index = _index(limited)
            kth = sampling.top_k_floor(probs[index], _column(state.top_k, slots[limited]))
            floor[index] = torch.maximum(floor[index], kth)
        if not (needs & TOP_P).any():
            return sampling.draw_above(probs, floor, keys)
        return sampling.draw_truncated(probs, floor, _column(state.top_p, slots), keys)

    def _penalise(self, logits: Tensor, slots: Int32, rows: Int64) -> None:
        state, chosen = self.slots, slots[rows]
        index = torch.from_numpy(chosen.astype(np.int64))

        def apply(part: Tensor) -> None:
            sampling.apply_penalties(
                part,
                state.output_counts[index],
                state.prompt_mask[index],
                _column(state.repetition, chosen),
                _column(state.frequency, chosen),
                _column(state.presence, chosen),
            )

        _in_place(logits, rows, apply)

    def _constrain(self, logits: Tensor, slots: Int32, rows: Int64) -> None:
        """Bans what the grammars do not allow. No later step gives a banned id back."""
        index = torch.full((len(slots),), -1, dtype=torch.int64)
        index[_index(rows)] = torch.arange(len(rows))
        allowed = torch.from_numpy(self.slots.constraints.masks[slots[rows]])
        masks.keep_allowed(logits, index, allowed)

    def _edit(self, logits: Tensor, slots: Int32, positions: Int32, rows: Int64) -> None:
        """Allowed ids, bad words, min_tokens and logit_bias. A row that would have no token left
        keeps its allowed ids: the bans of words and of early stops are dropped for this draw."""
        state = self.slots
        for row in rows.tolist():
            slot, edits, scores = int(slots[row]), state.edits[int(slots[row])], logits[row]
            num_output = int(positions[row] - state.prompt_len[slot])
            if edits.allowed is not None:
                kept = scores[edits.allowed]
                scores.fill_(NEG_INF)
                scores[edits.allowed] = kept
            early = edits.min_stop_ids is not None and num_output < state.min_tokens[slot]
            if early or edits.word_ends is not None:
                before = scores.clone()
                if edits.word_ends is not None:
                    self._ban_words(scores, slot, int(positions[row]), num_output)
                if early:
                    scores[edits.min_stop_ids] = NEG_INF
                torch.where(scores.amax() == NEG_INF, before, scores, out=scores)
            if edits.bias_ids is not None and edits.bias is not None:
                scores.index_add_(0, edits.bias_ids, edits.bias)

    def _ban_words(self, scores: Tensor, slot: int, position: int, num_output: int) -> None:
        """Bans each id that would complete a bad word whose other ids end the output."""
        edits = self.slots.edits[slot]
        prefixes, lengths, ends = edits.word_prefixes, edits.word_lengths, edits.word_ends
        assert prefixes is not None and lengths is not None and ends is not None
        size = prefixes.shape[1]
        tail = torch.full((size,), -1, dtype=torch.int32, device=scores.device)
        known = min(size, position)
        if known:
            tail[size - known :] = self.slots.history[slot, position - known : position]
        met = ((prefixes == tail) | (prefixes < 0)).all(-1) & (lengths <= num_output)
        zero = torch.zeros((), dtype=scores.dtype, device=scores.device)
        scores.index_add_(0, ends, torch.where(met, zero + NEG_INF, zero))


def describe(logprobs: Tensor, tokens: Tensor, wanted: Int32) -> Logprobs:
    """Column 0: ``tokens`` (int64 [q]); then the ``wanted[i]`` most likely, padded with id -1.

    logprobs: float32 [q, V] log-softmax rows of the raw logits.
    """
    return as_logprobs(*sampling.top_logprobs(logprobs, tokens, int(wanted.max())), wanted)


def as_logprobs(ids: Tensor, values: Tensor, ranks: Tensor, wanted: Int32) -> Logprobs:
    """What ``sampling.top_logprobs`` gave, on the host, without what row i did not ask for."""
    result = Logprobs(ids.numpy(), values.numpy(), ranks.numpy())
    unasked = np.arange(result.ids.shape[1])[None] > wanted[:, None]
    if unasked.any():
        result.ids[unasked] = -1
        result.values[unasked] = NEG_INF
    return result


def no_logprobs(k: int) -> Logprobs:
    """Of no tokens at all, with columns for ``k`` alternatives."""
    shape = (0, k + 1)
    empty = np.zeros(shape, dtype=np.float32)
    return Logprobs(np.zeros(shape, dtype=np.int32), empty, np.zeros(0, dtype=np.int32))


def stack(parts: list[Logprobs]) -> Logprobs:
    """The rows of all parts in one, padded to the widest."""
    if len(parts) == 1:
        return parts[0]
    width = max(part.ids.shape[1] for part in parts)

    def padded(array: NDArray[Any], fill: float) -> NDArray[Any]:
        extra = ((0, 0), (0, width - array.shape[1]))
        return np.pad(array, extra, constant_values=fill)

    return Logprobs(
        np.concatenate([padded(part.ids, -1) for part in parts]),
        np.concatenate([padded(part.values, NEG_INF) for part in parts]),
        np.concatenate([part.ranks for part in parts]),
    )


def _index(rows: Int64) -> Tensor:
    return torch.from_numpy(rows)


def _column(column: NDArray[Any], slots: Int32) -> Tensor:
    return torch.from_numpy(column[slots])


def _in_place(logits: Tensor, rows: Int64, change: Callable[[Tensor], None]) -> None:
    """``change`` on the given rows of logits; without a copy when they are all rows."""
    if len(rows) == len(logits):
        change(logits)
        return
    part = logits[_index(rows)]
    change(part)
    logits[_index(rows)] = part
