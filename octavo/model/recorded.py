"""A decoder on a CPU as one call: recorded once, run for every step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from octavo.ops.native.calls import Pool, Tape

_LEAST_TOKENS = 1024  # a step of so many is recorded at first

# Ids int64 [T] or what the first layer takes [T, hidden], caches, states, tokens int64 [r] or None
# -> [T or r, hidden].
Layers = Callable[[Tensor, list[Tensor], Sequence[Any], Tensor | None], Tensor]


@dataclass
class _Recording:
    """``states``: those it was made with, overwritten with every step's. ``y``: a buffer that the
    next run writes again."""

    tape: Tape
    first: Tensor
    tokens: Tensor | None
    states: Sequence[Any]
    cache: list[Tensor]
    y: Tensor


class RecordedLayers:
    """Calls layers whose operations are all kernels that a tape can hold through tapes: one for all
    tokens of a step, one for some of them. A tape is made anew, for twice as many tokens, when a
    step is larger than any before; its buffers keep what memory the largest step took."""

    def __init__(self) -> None:
        self._pool = Pool()
        self._recordings: dict[bool, _Recording] = {}

    def __call__(
        self,
        layers: Layers,
        first: Tensor,
        cache: list[Tensor],
        states: Sequence[Any],
        tokens: Tensor | None,
    ) -> Tensor:
        """As ``layers``, which are the same every time."""
        count = len(first)
        found = self._recordings.get(tokens is not None)
        if found is None or found.cache is not cache or len(found.first) < count:
            found = self._record(layers, first, cache, states, tokens is not None)
        found.first[:count] = first
        for mine, state in zip(found.states, states):
            mine.become(state)
        if tokens is None or found.tokens is None:
            found.tape.run(count)
            return found.y[:count].clone()
        found.tokens[: len(tokens)] = tokens
        found.tape.run(count, len(tokens))
        return found.y[: len(tokens)].clone()

    def _record(
        self,
        layers: Layers,
        first: Tensor,
        cache: list[Tensor],
        states: Sequence[Any],
        some: bool,
    ) -> _Recording:
        size = _LEAST_TOKENS
        while size < len(first):
            size *= 2
        self._recordings.pop(some, None)  # its buffers are free again
        # A tape tells numbers of rows apart by their sizes.
        tape = Tape((size, size + 1) if some else (size,), self._pool)
        first = first.new_zeros(size, *first.shape[1:])
        tokens = torch.zeros(size + 1, dtype=torch.int64) if some else None
        with tape.recording():
            y = layers(first, cache, states, tokens)
        self._recordings[some] = _Recording(tape, first, tokens, states, cache, y)
        return self._recordings[some]
