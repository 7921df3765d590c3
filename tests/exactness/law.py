"""Are answers what the oracle's logits and the law of docs/sampling.md say, up to an error?

An engine that computes in 16 bits has logits that are off by a little, so it may take a near-tie
the other way; anything else is a fault. Every token is judged given the tokens before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from octavo.ops.needs import EDITS, PENALTIES
from octavo.types import SamplingParams
from octavo.worker.sampler import Sampler
from octavo.worker.slots import Slots
from tests.fixtures.oracle import Oracle
from tests.worker.plans import New, Row, int32, plan

EOS = 1
MOST_TOKENS = 512
TRIES = 512  # of logits within the error, to find one that draws a token


@dataclass
class Verdict:
    """``near_ties`` of ``tokens`` were taken otherwise than the oracle would; ``gap``: between the
    logits of the oracle's choice and of the worst greedy one."""

    tokens: int = 0
    near_ties: int = 0
    gap: float = 0.0

    def __add__(self, other: Verdict) -> Verdict:
        return Verdict(
            self.tokens + other.tokens,
            self.near_ties + other.near_ties,
            max(self.gap, other.gap),
        )


@dataclass
class Law:
    """``error``: how far a logit may be off. What has been computed once is kept."""

    reference: Oracle
    error: float
    _logits: dict[tuple[int, ...], Tensor] = field(default_factory=dict)
    _verdicts: dict[str, Verdict] = field(default_factory=dict)

    def with_error(self, error: float) -> Law:
        return Law(self.reference, error, self._logits)

    def logits(self, prompt: list[int], tokens: list[int]) -> Tensor:
        """[len(tokens), vocab]: what each of ``tokens`` was drawn from."""
        known = (*prompt, *tokens[:-1])
        if known not in self._logits:
            self._logits[known] = self.reference.logits(list(known))
        return self._logits[known][len(prompt) - 1 :]

    def judge(
        self,
        prompt: list[int],
        tokens: list[int],
        params: SamplingParams,
        choice: int = 0,
        bad_words: Sequence[list[int]] = (),
    ) -> Verdict:
        """AssertionError for a token that no logits within the error draw."""
        key = repr((prompt, tokens, params, choice, bad_words))
        if key not in self._verdicts:
            stops = [*([] if params.ignore_eos else [EOS]), *(params.stop_token_ids or ())]
            unreported = params.clone(logprobs=None, prompt_logprobs=None)
            seed = (params.seed or 0) + choice
            new = New(0, prompt, unreported, seed, None, stops, list(bad_words))
            self._verdicts[key] = self._judge(new, tokens)
        return self._verdicts[key]

    def _judge(self, new: New, tokens: list[int]) -> Verdict:
        logits = self.logits(new.ids, tokens)
        slots = Slots(1, MOST_TOKENS, MOST_TOKENS, logits.shape[1])
        first = plan(Row(0, 0, 1, blocks=[0]), new=(new,), freed=(0,))
        slots.apply(first)
        sampler = Sampler(slots)
        drawn = self._drawn(sampler, logits, tokens)
        verdict = Verdict(len(tokens))
        for index in np.nonzero(drawn != np.array(tokens))[0].tolist():
            slots.apply(first)
            _append(slots, tokens[:index])
            verdict += self._judge_near_tie(sampler, logits[index], tokens[index])
        return verdict

    def _drawn(self, sampler: Sampler, logits: Tensor, tokens: list[int]) -> np.ndarray:
        """What the oracle's logits draw after each of the tokens before."""
        slots = sampler.slots
        positions = np.arange(len(tokens), dtype=np.int32) + slots.length[0]
        rows = np.zeros(len(tokens), dtype=np.int32)
        if not slots.needs[0] & (EDITS | PENALTIES):
            return sampler.sample(logits.clone(), rows, positions).tokens.numpy()
        found = []
        for index, token in enumerate(tokens):
            one = slice(index, index + 1)
            found += sampler.sample(logits[one].clone(), rows[one], positions[one]).tokens.tolist()
            _append(slots, [token])
        return np.array(found)

    def _judge_near_tie(self, sampler: Sampler, logits: Tensor, token: int) -> Verdict:
        slots = sampler.slots
        position = int(slots.length[0])
        if not slots.needs[0]:
            gap = float(logits.max() - logits[token])
            assert gap < 2 * self.error, f"{token} at {position} is {gap:.3f} below the best"
            return Verdict(near_ties=1, gap=gap)
        noise = np.random.default_rng(0).uniform(-self.error, self.error, (TRIES, len(logits)))
        rows = logits + torch.from_numpy(noise.astype(np.float32))
        zeros = np.zeros(TRIES, dtype=np.int32)
        drawn = set(sampler.sample(rows, zeros, zeros + position).tokens.tolist())
        assert token in drawn, f"{token} at {position} is none of {drawn}"
        return Verdict(near_ties=1)


def _append(slots: Slots, tokens: list[int]) -> None:
    for token in tokens:
        slots.append(int32([0]), slots.length[:1].copy(), torch.tensor([token]))
