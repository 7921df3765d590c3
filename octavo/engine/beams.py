"""Beam search, as a loop above the engine: the scheduler knows no beams.

A step asks the engine for the most likely tokens after each live beam: one request per beam that
draws one token, whose prompt is the prompt and the beam. Full blocks come from the prefix cache,
so a fork costs the tokens of its last, partial block.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field

import msgspec
import numpy as np

from octavo.engine.messages import AddRequest, EngineInfo, TokenLogprobRow, pack_ids, unpack_ids
from octavo.types import BeamSearchParams, FinishReason, SamplingParams


def no_stop(tokens: list[int]) -> str | None:
    return None


@dataclass(slots=True)
class Beam:
    """A continuation of the prompt. ``rows``, where they are kept: of each token, it first, then
    the most likely."""

    tokens: list[int] = field(default_factory=list)
    cum_logprob: float = 0.0
    rows: list[TokenLogprobRow] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def score(self, length_penalty: float) -> float:
        """Log-probability of the tokens, the one that ended it included, over their number to the
        power of the penalty."""
        return self.cum_logprob / math.pow(max(1, len(self.tokens)), length_penalty)


class BeamSearch:
    """The search after one prompt.

    In each step the continuations of all live beams are ranked by log-probability. Those of the
    best ``width`` that end (EOS, a stop id) are complete; the best ``width`` others live on, less
    those whose text completes a stop string. With ``early_stopping`` it ends once ``width`` are
    complete, else once no live beam can overtake the best ``width`` of them: what a search up to
    the last token would find. The best ``width`` by score are the answers (transformers'
    ``early_stopping=True`` and ``"never"``).
    """

    def __init__(
        self,
        request: AddRequest,
        params: BeamSearchParams,
        info: EngineInfo,
        stop_in: Callable[[list[int]], str | None] = no_stop,
        num_logprobs: int | None = None,
    ) -> None:
        """``request``: checked, as if ``width`` choices were asked for. ``stop_in``: the stop
        string that the last of these tokens completes. ``num_logprobs``: the most likely tokens
        that each row keeps beside its own; -1: the whole vocabulary; None: no rows are kept."""
        self.request = request
        self.params = params
        self.live = [Beam()]
        self.complete: list[Beam] = []  # the best ``beam_width`` so far, the best one first
        self._prompt = unpack_ids(request.prompt_ids)
        self._stop_in = stop_in
        eos: Collection[int] = () if params.ignore_eos else info.eos_ids
        self._ends: dict[int, int | None] = {token: token for token in params.stop_token_ids}
        self._ends.update(dict.fromkeys(eos, None))  # token -> stop reason
        width = params.beam_width
        self._num_kept = info.vocab_size if num_logprobs == -1 else num_logprobs
        count = max(2 * width, width + len(self._ends), self._num_kept or 0)
        self.num_candidates = min(info.vocab_size, count)

    @property
    def num_steps(self) -> int:
        """How often it has advanced; 0 once it is done."""
        return len(self.live[0].tokens) if self.live else 0

    @property
    def done(self) -> bool:
        return not self.live

    def requests(self, first_handle: int) -> Iterator[AddRequest]:
        """One for each live beam, in order."""
        params = SamplingParams(
            temperature=0.0, max_tokens=1, logprobs=self.num_candidates, ignore_eos=True,
            detokenize=False,
        )  # fmt: skip
        for i, beam in enumerate(self.live):
            ids = np.concatenate([self._prompt, np.array(beam.tokens, dtype=np.int32)])
            yield msgspec.structs.replace(
                self.request,
                handle=first_handle + i,
                request_id=f"{self.request.request_id}-{len(beam.tokens)}-{i}",
                prompt_ids=pack_ids(ids),
                params=params,
                max_tokens=1,
                bad_words=[],
            )

    def advance(self, rows: list[TokenLogprobRow]) -> None:
        """``rows[i]``: the ``num_candidates`` most likely tokens after live beam i, ranked, behind
        the token that was drawn."""
        width, live = self.params.beam_width, []
        for place, (score, parent, rank) in enumerate(self._ranked(rows)):
            beam = self._extended(parent, rows[parent], rank, score)
            if beam.tokens[-1] in self._ends and len(beam.tokens) > self.params.min_tokens:
                if place < width:
                    self._end(beam, FinishReason.STOP, self._ends[beam.tokens[-1]])
            else:
                live.append(beam)
            if len(live) == width:
                break
        self.live = [beam for beam in live if not self._stopped(beam)]
        self.complete = self.best()  # no other can be an answer any more
        if self._cannot_improve():
            self.live = []
        elif self.live and len(self.live[0].tokens) >= self.request.max_tokens:
            for beam in self.live:
                self._end(beam, FinishReason.LENGTH, None)
            self.live = []

    def best(self) -> list[Beam]:
        """The answers, best first, of what is complete."""
        penalty = self.params.length_penalty
        return sorted(self.complete, key=lambda beam: -beam.score(penalty))[
            : self.params.beam_width
        ]

    def _ranked(self, rows: list[TokenLogprobRow]) -> Iterator[tuple[float, int, int]]:
        """(log-probability of a continuation, its live beam, its token's rank), best first."""
        before = np.array([[beam.cum_logprob] for beam in self.live])
        totals = before + np.array([row.values[1:] for row in rows])
        for place in np.argsort(-totals, axis=None, kind="stable").tolist():
            parent, column = divmod(place, totals.shape[1])
            yield float(totals[parent, column]), parent, column + 1

    def _extended(self, parent: int, row: TokenLogprobRow, rank: int, score: float) -> Beam:
        beam = self.live[parent]
        tokens, rows = [*beam.tokens, row.ids[rank]], beam.rows
        if self._num_kept is not None:
            ids = [row.ids[rank], *row.ids[1 : 1 + self._num_kept]]
            values = [row.values[rank], *row.values[1 : 1 + self._num_kept]]
            rows = [*rows, TokenLogprobRow(row.handle, ids, values, rank)]
        return Beam(tokens, score, rows)

    def _stopped(self, beam: Beam) -> bool:
        stop = self._stop_in(beam.tokens)
        if stop is not None:
            self._end(beam, FinishReason.STOP, stop)
        return stop is not None

    def _end(self, beam: Beam, reason: FinishReason, stop_reason: int | str | None) -> None:
        beam.finish_reason, beam.stop_reason = reason.value, stop_reason
        self.complete.append(beam)

    def _cannot_improve(self) -> bool:
        best = self.complete
        if len(best) < self.params.beam_width:
            return False
        if self.params.early_stopping or not self.live:
            return True
        # Log-probabilities only fall. With a penalty above 0 a long beam loses the least by that.
        penalty = self.params.length_penalty
        length = self.request.max_tokens if penalty > 0 else len(self.live[0].tokens)
        most = max(beam.cum_logprob for beam in self.live) / math.pow(length, penalty)
        return best[-1].score(penalty) >= most
