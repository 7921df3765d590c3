"""The CPU workload: the same token-id prompts and lengths for every system that is measured.

Lengths do not depend on the repetition, token ids do, so that a prefix cache can never turn the
second repetition into a hit. Ids avoid the demo model's special tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

FIRST_ID, END_ID = 17, 49152
SEED = 20260726


@dataclass(frozen=True)
class Work:
    """One request: greedy, exactly ``max_tokens`` tokens whatever they are."""

    prompt: list[int]
    max_tokens: int


def _ids(rng: np.random.Generator, count: int) -> list[int]:
    return [int(token) for token in rng.integers(FIRST_ID, END_ID, size=count)]


def warm_up() -> list[Work]:
    """Four requests to run before measuring."""
    rng = np.random.default_rng([SEED, 99])
    lengths = ((64, 16), (200, 24), (500, 8), (33, 16))
    return [Work(_ids(rng, prompt), output) for prompt, output in lengths]


def batch_1(repetition: int = 0) -> list[Work]:
    """One request, 128 tokens in, 128 out."""
    return [Work(_ids(np.random.default_rng([SEED, 1, repetition]), 128), 128)]


def prefill(repetition: int = 0) -> list[Work]:
    """One request, 1,024 tokens in, 1 out."""
    return [Work(_ids(np.random.default_rng([SEED, 2, repetition]), 1024), 1)]


def mixed(repetition: int = 0, count: int = 32) -> list[Work]:
    """``count`` requests, 32 .. 512 tokens in, 16 .. 256 out."""
    lengths = np.random.default_rng([SEED, 3])
    inputs, outputs = lengths.integers(32, 513, size=count), lengths.integers(16, 257, size=count)
    rng = np.random.default_rng([SEED, 4, repetition])
    return [Work(_ids(rng, int(i)), int(o)) for i, o in zip(inputs, outputs)]


def shared(repetition: int = 0, count: int = 16, phase: int = 0) -> list[Work]:
    """``count`` requests with one prefix of 1,000 tokens, 32 own tokens each, 16 out. Phase 0 is
    the prefix's first appearance; phase 1 has new tails (the prefix is cached by then)."""
    prefix = _ids(np.random.default_rng([SEED, 5, repetition]), 1000)
    rng = np.random.default_rng([SEED, 6, repetition, phase])
    return [Work(prefix + _ids(rng, 32), 16) for _ in range(count)]
