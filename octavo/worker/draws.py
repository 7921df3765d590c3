"""Draws: the tokens of a step's rows, and how far their guesses agree with them.

A guess is right where it is the token that would have been drawn in its place: with the noise of
its (seed, position), from the processed logits. So what comes out never depends on the guesses.
Rows whose logits depend on counts or grammars are drawn one position after the other, as many as
agree; all other positions at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.core.plan import Logprobs, StepResult, laid_out
from octavo.model.decoder import Model
from octavo.model.shard import TensorParallel
from octavo.ops.needs import GRAMMAR, PENALTIES
from octavo.types import EngineDead
from octavo.worker.batch import StepBatch
from octavo.worker.constraints import advance
from octavo.worker.sampler import Drawn, Sampler, join, only_tokens, stack
from octavo.worker.slots import Slots

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]


@dataclass(slots=True)
class _Runs:
    """What r rows have drawn so far."""

    tokens: Int64  # [r, k + 1]
    counts: Int32  # [r]
    grammar_ends: dict[int, str] = field(default_factory=dict)
    logprobs: list[tuple[Int64, Int64, Logprobs]] = field(default_factory=list)  # of tokens: their
    # rows [q], places in them [q], and a table of q entries; of guesses that were wrong too


class Drawer:
    """Draws for the rows of a step from their hidden states."""

    def __init__(
        self,
        model: Model,
        slots: Slots,
        ranks: TensorParallel,
        follows: bool,
        logit_rows: int,
        ignored: int = 0,
    ) -> None:
        """``follows``: another rank draws, where that is more than the most likely token.
        ``logit_rows``: of which logits are computed at a time. ``ignored``: needs that do not
        count."""
        self._model = model
        self._slots = slots
        self._ranks = ranks
        self._follows = follows
        self._logit_rows = logit_rows
        self._ignored = ignored
        self._sampler = Sampler(slots)

    def draw(self, batch: StepBatch, hidden: Tensor, result: StepResult) -> None:
        """hidden: [r, hidden], of the batch's ``logit_rows``. Writes into ``result`` and the
        slots."""
        slots = batch.slots[batch.drawing]
        width = int(batch.num_guesses.max(initial=0)) + 1
        shape = (len(slots), width)
        runs = _Runs(np.zeros(shape, dtype=np.int64), np.zeros(len(slots), dtype=np.int32))
        everyone = np.arange(len(slots))
        if width == 1:
            self._draw_next(batch, slots, hidden, everyone, everyone, 0, runs)
        else:
            self._draw_runs(batch, slots, hidden, runs)
        self._tell(batch, runs, result)

    def _draw_runs(self, batch: StepBatch, slots: Int32, hidden: Tensor, runs: _Runs) -> None:
        guesses = batch.num_guesses
        first = np.cumsum(guesses + 1) - (guesses + 1)  # of each row's ``hidden``
        in_turn = (self._slots.needs[slots] & (PENALTIES | GRAMMAR)) != 0
        if not in_turn.all():
            self._draw_at_once(batch, slots, hidden, first, (~in_turn).nonzero()[0], runs)
        rows, place = in_turn.nonzero()[0], 0
        while len(rows):
            # The history holds the guess until the draw is written there.
            at = np.minimum(batch.draw_positions[rows] + place, self._slots.max_len)
            guessed = self._slots.history_host[slots[rows], at]
            self._draw_next(batch, slots, hidden, rows, first[rows] + place, place, runs)
            # Also where a grammar has ended, which the ranks that follow do not know.
            rows = rows[(place < guesses[rows]) & (runs.tokens[rows, place] == guessed)]
            place += 1

    def _draw_at_once(
        self,
        batch: StepBatch,
        slots: Int32,
        hidden: Tensor,
        first: Int64,
        rows: Int64,
        runs: _Runs,
    ) -> None:
        """All positions of ``rows``: each as if the guesses before it were right."""
        counts = batch.num_guesses[rows] + 1
        each, places = laid_out(counts)
        own, positions = slots[rows], batch.draw_positions[rows]
        index = first[rows][each] + places
        part = hidden if len(index) == len(hidden) else hidden[torch.from_numpy(index)]
        drawn = self.choose(part, own[each], positions[each] + places)
        tokens = np.full((len(rows), runs.tokens.shape[1]), -1, dtype=np.int64)
        tokens[each, places] = drawn.tokens.numpy()
        behind = positions[:, None] + np.arange(tokens.shape[1] - 1)
        guessed = self._slots.history_host[own[:, None], np.minimum(behind, self._slots.max_len)]
        right = tokens[:, :-1] == guessed
        right &= np.arange(tokens.shape[1] - 1) < batch.num_guesses[rows][:, None]
        accepted = np.cumprod(right, axis=1).sum(axis=1).astype(np.int32) + 1
        self._slots.append_runs(own, positions, accepted, tokens)
        runs.tokens[rows], runs.counts[rows] = tokens, accepted
        if drawn.logprobs is not None:
            described = drawn.rows
            runs.logprobs.append((rows[each[described]], places[described], drawn.logprobs))

    def _draw_next(
        self,
        batch: StepBatch,
        slots: Int32,
        hidden: Tensor,
        rows: Int64,
        index: Int64,
        place: int,
        runs: _Runs,
    ) -> None:
        """One token of each of ``rows``, their ``place``-th in this step, from ``hidden[index]``;
        grammars take it."""
        own, positions = slots[rows], batch.draw_positions[rows] + place
        part = hidden if len(index) == len(hidden) else hidden[torch.from_numpy(index)]
        drawn = self.choose(part, own, positions)
        self._slots.append(own, positions, drawn.tokens)
        runs.tokens[rows, place] = drawn.tokens.numpy()
        if drawn.logprobs is not None:
            described = rows[drawn.rows]
            runs.logprobs.append((described, np.full_like(described, place), drawn.logprobs))
        going_on = rows
        if runs.grammar_ends:
            going_on = rows[~np.isin(rows, list(runs.grammar_ends))]
        runs.counts[going_on] = place + 1
        if self._slots.constraints:
            matchers = self._slots.constraints.of(own.tolist())
            ends, dropped = advance(matchers, drawn.tokens.tolist())
            runs.grammar_ends |= {int(rows[at]): message for at, message in ends.items()}
            runs.counts[rows[dropped]] = place

    def choose(self, hidden: Tensor, slots: Int32, positions: Int32) -> Drawn:
        """The tokens at ``positions`` of ``slots``, from ``hidden`` [r, hidden]."""
        if not (self._slots.needs[slots] & ~np.uint8(self._ignored)).any():
            parts = [self._model.most_likely(hidden[part]) for part in self._parts(len(slots))]
            return only_tokens(torch.cat(parts))
        if self._follows:
            for part in self._parts(len(slots)):
                self._model.logits(hidden[part])  # this rank's share of them
            drawn = only_tokens(self._ranks.agreed(torch.empty(len(slots), dtype=torch.int64)))
            if len(slots) and int(drawn.tokens[0]) < 0:
                raise RuntimeError("the rank that draws could not")
            return drawn
        try:
            if self._slots.constraints and not self._ignored & GRAMMAR:
                self._slots.constraints.fill(slots.tolist())
            drawn = join(
                [
                    self._sampler.sample(
                        self._model.logits(hidden[part]),
                        slots[part],
                        positions[part],
                        self._ignored,
                    )
                    for part in self._parts(len(slots))
                ]
            )
        except EngineDead:
            raise
        except Exception:  # the others are waiting
            self._ranks.agreed(torch.full((len(slots),), -1, dtype=torch.int64))
            raise
        self._ranks.agreed(drawn.tokens)
        return drawn

    def _parts(self, num_rows: int) -> Iterator[slice]:
        size = self._logit_rows
        return (slice(start, start + size) for start in range(0, num_rows, size))

    def _tell(self, batch: StepBatch, runs: _Runs, result: StepResult) -> None:
        rows = batch.plan_rows[batch.drawing]
        if runs.tokens.shape[1] > 1:
            result.tokens = np.zeros((len(result.tokens), runs.tokens.shape[1]), dtype=np.int32)
        result.tokens[rows] = runs.tokens
        result.num_accepted[rows] = runs.counts
        result.grammar_ends = {int(rows[row]): text for row, text in runs.grammar_ends.items()}
        if runs.logprobs:
            described, places, tables = zip(*runs.logprobs)
            owners, nth, table = np.concatenate(described), np.concatenate(places), stack([*tables])
            order = np.lexsort((nth, owners))
            order = order[nth[order] < runs.counts[owners[order]]]
            result.logprob_rows = rows[owners[order]].astype(np.int32)
            result.logprobs = Logprobs(table.ids[order], table.values[order], table.ranks[order])
