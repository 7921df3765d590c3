"""Tokens follow the law of docs/sampling.md beside guesses: chi-square over many seeds.

A stub model with fixed logits stands for a model; the law is computed in FP64 by the definition.
Every row guesses the likeliest first token. Its first draw follows the first law whatever it
guessed, its second one, where the guess was right, the law after that token.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from octavo.core.plan import StepResult
from octavo.model.shard import ALONE
from octavo.types import SamplingParams
from octavo.worker.batch import StepBatch
from octavo.worker.draws import Drawer
from octavo.worker.slots import Slots
from tests.worker.plans import New, Row, int32, plan

pytestmark = pytest.mark.usefixtures("one_thread")
VOCAB, ROWS, DRAWS = 16, 10_000, 200_000
PROMPT = [3, 5, 5, 9]
STOPS = [2, 7]
COLUMNS = (
    *("length", "num_blocks", "prompt_len", "needs", "temperature", "top_k", "top_p", "min_p"),
    *("repetition", "frequency", "presence", "min_tokens"),
)
LOGITS = torch.from_numpy(
    np.random.default_rng(23).normal(0, 1.5, (1 + VOCAB, VOCAB)).astype(np.float32)
)  # after the prompt; after each token behind it


class FixedLogits:
    """hidden: [r, 1], the row of LOGITS."""

    def logits(self, hidden: Tensor) -> Tensor:
        return LOGITS[hidden[:, 0]]

    def most_likely(self, hidden: Tensor) -> Tensor:
        return self.logits(hidden).argmax(-1)


def law(params: SamplingParams, output: list[int]) -> np.ndarray:
    """Probabilities of the token after PROMPT and ``output``, FP64 [VOCAB]."""
    x = LOGITS[1 + output[-1] if output else 0].numpy().astype(np.float64)
    if params.allowed_token_ids:
        x[[token for token in range(VOCAB) if token not in params.allowed_token_ids]] = -np.inf
    if len(output) < params.min_tokens:
        x[STOPS] = -np.inf
    for token, bias in (params.logit_bias or {}).items():
        x[int(token)] += bias
    for token in {*PROMPT, *output}:
        factor = params.repetition_penalty
        x[token] = x[token] / factor if x[token] > 0 else x[token] * factor
    for token in set(output):
        x[token] -= params.frequency_penalty * output.count(token) + params.presence_penalty
    x = np.exp((x - x.max()) / params.temperature)
    p = x / x.sum()
    p[p < params.min_p * p.max()] = 0
    if params.top_k > 0:
        p[p < np.sort(p)[-params.top_k]] = 0
    order = np.argsort(-p)
    before = np.cumsum(p[order]) - p[order]
    p[order[before >= params.top_p * p.sum()]] = 0
    return p / p.sum()


@dataclass
class Rows:
    """ROWS slots with the same request, each round with seeds of their own."""

    params: SamplingParams
    guess: int
    slots: Slots = field(init=False)
    drawer: Drawer = field(init=False)

    def __post_init__(self) -> None:
        self.slots = slots = Slots(ROWS, 8, 8, VOCAB)
        new = New(0, PROMPT, self.params, min_stop_ids=STOPS)
        slots.apply(plan(Row(0, 0, len(PROMPT), blocks=[0]), new=(new,)))
        for name in COLUMNS:
            getattr(slots, name)[1:] = getattr(slots, name)[0]
        slots.history_host[1:] = slots.history_host[0]
        slots.prompt_mask[1:] = slots.prompt_mask[0]
        if 0 in slots.edits:
            slots.edits = dict.fromkeys(range(ROWS), slots.edits[0])
        self.drawer = Drawer(FixedLogits(), slots, ALONE, False, 1 << 20)  # type: ignore[arg-type]

    def seed(self, number: int) -> None:
        """The state after the prompt, with other seeds."""
        slots, rng = self.slots, np.random.default_rng(number)
        slots.seed_low[:], slots.seed_high[:] = rng.integers(-(1 << 31), 1 << 31, (2, ROWS))
        slots.length[:] = len(PROMPT)
        slots.output_counts[:] = 0

    def draw(self, rows: np.ndarray, hidden: list[int]) -> StepResult:
        """``hidden`` of each row: one more than it brings guesses, which is 0 or 1."""
        slots, num_guesses = rows.astype(np.int32), len(hidden) - 1
        counts = np.full(len(rows), num_guesses, dtype=np.int32)
        self.slots.write_guesses(slots, counts, np.full((len(rows), 1), self.guess))
        batch: Any = SimpleNamespace(
            slots=slots,
            plan_rows=np.arange(len(rows)),
            drawing=np.arange(len(rows)),
            draw_positions=self.slots.length[slots],
            num_guesses=counts,
        )
        assert set(vars(batch)) < set(StepBatch.__slots__)
        zeros = np.zeros((len(rows), 1), dtype=np.int32)
        result = StepResult(0, zeros, zeros[:, 0].copy(), int32([]))
        self.drawer.draw(batch, torch.tensor(hidden * len(rows))[:, None], result)
        return result


KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "top-k": {"temperature": 0.8, "top_k": 5},
    "top-p": {"temperature": 1.3, "top_p": 0.7},
    "min-p": {"min_p": 0.1},
    "all three": {"temperature": 1.5, "top_k": 9, "top_p": 0.8, "min_p": 0.05},
    "penalties": {"presence_penalty": 0.4, "frequency_penalty": 0.3, "repetition_penalty": 1.5},
    "penalties and top-k": {"frequency_penalty": 1.0, "top_k": 7, "temperature": 0.9},
}
EDITED: dict[str, dict[str, Any]] = {  # taken row by row, which is slow
    "bias": {"logit_bias": {4: 1.5, 6: -100.0, 11: -1.0}},
    "allowed": {"allowed_token_ids": [1, 2, 5, 8, 13], "top_p": 0.9},
    "least": {"min_tokens": 1, "top_k": 12},
    "punished": {"min_tokens": 2, "logit_bias": {4: 1.5}, "presence_penalty": 0.5, "top_p": 0.9},
    "edits": {"min_tokens": 1, "logit_bias": {4: 1.5}, "allowed_token_ids": [*range(12)]},
}


@pytest.mark.parametrize(
    ("kind", "draws"),
    [
        *((kind, DRAWS) for kind in KINDS),
        ("edits", ROWS),
        *(pytest.param(kind, DRAWS, marks=pytest.mark.long) for kind in EDITED),
    ],
)
def test_draws_beside_guesses_follow_the_law(kind: str, draws: int) -> None:
    params = SamplingParams(seed=0, **{**KINDS, **EDITED}[kind])
    first = law(params, [])
    guess = int(first.argmax())
    second, rows = law(params, [guess]), Rows(params, guess)
    counts = np.zeros((2, VOCAB), dtype=np.int64)
    everyone = np.arange(ROWS)
    for number in range(draws // ROWS):
        rows.seed(number)
        result = rows.draw(everyone, [0, 1 + guess])
        right = result.tokens[:, 0] == guess
        assert (result.num_accepted == 1 + right).all()
        assert (rows.slots.length == len(PROMPT) + 1 + right).all()
        counts[0] += np.bincount(result.tokens[:, 0], minlength=VOCAB)
        counts[1] += np.bincount(result.tokens[right, 1], minlength=VOCAB)
        if number == 0:
            check_without_guesses(rows, result, right)
    assert counts[0].sum() == draws and counts[1].sum() == counts[0, guess]
    assert chance(counts[0], first) > 0.01
    assert chance(counts[1], second) > 0.01
    assert chance(counts[0], second) < 1e-9  # it can tell the two apart


def check_without_guesses(rows: Rows, result: StepResult, right: np.ndarray) -> None:
    """The same seeds give the same tokens one by one."""
    rows.seed(0)
    alone = rows.draw(np.arange(ROWS), [0])
    assert alone.tokens.shape[1] == 1 and (alone.num_accepted == 1).all()
    assert (alone.tokens[:, 0] == result.tokens[:, 0]).all()
    after = rows.draw(right.nonzero()[0], [1 + rows.guess])
    assert (after.tokens[:, 0] == result.tokens[right, 1]).all()


def chance(counts: np.ndarray, probabilities: np.ndarray) -> float:
    """Of counts at least so far from what is expected (chi-square)."""
    possible = probabilities > 0
    if counts[~possible].any():
        return 0.0
    expected = counts.sum() * probabilities[possible]
    distance = ((counts[possible] - expected) ** 2 / expected).sum()
    half = torch.tensor([(possible.sum() - 1) / 2, distance / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))
