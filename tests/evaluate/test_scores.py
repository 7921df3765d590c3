"""Scores and divergences against their definitions in FP64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from octavo.evaluate.corpus import cut
from octavo.evaluate.scores import (
    agreements,
    divergences,
    log_probabilities,
    negative_log_likelihoods,
)
from octavo.types import ConfigError


def rows(seed: int, count: int = 50, vocab: int = 5000, spread: float = 3.0) -> torch.Tensor:
    return torch.randn(count, vocab, generator=torch.Generator().manual_seed(seed)) * spread


@pytest.mark.parametrize("change", [1e-3, 0.1, 3.0])
def test_divergence_is_the_definitions_and_knows_no_shift(change: float) -> None:
    other = rows(0)
    logits = other + rows(1) * change
    found = divergences(log_probabilities(other), log_probabilities(logits))
    p, q = other.double().softmax(-1).numpy(), logits.double().softmax(-1).numpy()
    expected = torch.from_numpy((p * np.log(p / q)).sum(-1))
    torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-13)
    moved = divergences(log_probabilities(other.double() + 40), log_probabilities(logits))
    torch.testing.assert_close(moved, expected, rtol=1e-8, atol=1e-13)


def test_equal_logits_diverge_by_exactly_nothing() -> None:
    log_probs = log_probabilities(rows(0))
    assert divergences(log_probs, log_probs.clone()).eq(0).all()
    assert agreements(log_probs, log_probs.clone()).all()


def test_likelihoods_are_the_cross_entropy() -> None:
    logits = rows(2)
    targets = torch.arange(len(logits)) * 90
    expected = F.cross_entropy(logits.double(), targets, reduction="none")
    found = negative_log_likelihoods(log_probabilities(logits), targets)
    torch.testing.assert_close(found, expected)


def test_chunks_lie_evenly_over_the_text() -> None:
    ids = list(range(107))
    assert [chunk[0] for chunk in cut(ids, 10, None)] == list(range(0, 100, 10))
    assert [chunk[0] for chunk in cut(ids, 10, 30)] == [0, 30, 60]
    assert all(len(chunk) == 10 for chunk in cut(ids, 10, 35))
    with pytest.raises(ConfigError, match="107 tokens, a chunk 200"):
        cut(ids, 200, None)
    with pytest.raises(ConfigError, match="--max-tokens 9"):
        cut(ids, 10, 9)
