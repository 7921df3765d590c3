"""A decoder's layers on a CPU as one call: recorded once, run for every step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from octavo.ops.native.calls import Pool, Tape

_LEAST_TOKENS = 1024  # a step of so many is recorded at first

# x [T, hidden], caches, states by geometry, tokens int64 [r] or None -> [T or r, hidden].
Layers = Callable[[Tensor, list[Tensor], Mapping[Any, Any], Tensor | None], Tensor]


@dataclass
class _Recording:
    tape: Tape
    x: Tensor
    tokens: Tensor | None
    states: Mapping[Any, Any]
    cache: list[Tensor]
    y: Tensor


class RecordedLayers:
    """Calls ``layers``, whose operations must all be kernels that a tape can hold, through tapes:
    one for all tokens of a step, one for some of them."""

    def __init__(self, layers: Layers) -> None:
        self._layers = layers
        self._pool = Pool()
        self._recordings: dict[bool, _Recording] = {}

    def __call__(
        self,
        x: Tensor,
        cache: list[Tensor],
        states: Mapping[Any, Any],
        tokens: Tensor | None,
    ) -> Tensor:
        """As ``layers``. ``x`` is kept as it is."""
        count = len(x)
        found = self._recordings.get(tokens is not None)
        if found is None or found.cache is not cache or len(found.x) < count:
            found = self._record(x, cache, states, tokens is not None)
        found.x[:count] = x
        for geometry, state in states.items():
            found.states[geometry].become(state)
        if tokens is None or found.tokens is None:
            found.tape.run(count)
            return found.y[:count].clone()
        found.tokens[: len(tokens)] = tokens
        found.tape.run(count, len(tokens))
        return found.y[: len(tokens)].clone()

    def _record(
        self, x: Tensor, cache: list[Tensor], states: Mapping[Any, Any], some: bool
    ) -> _Recording:
        size = _LEAST_TOKENS
        while size < len(x):
            size *= 2
        self._recordings.pop(some, None)  # its buffers are free again
        # A tape tells numbers of rows apart by their sizes.
        tape = Tape((size, size + 1) if some else (size,), self._pool)
        inputs = self._pool.take(size * x.shape[1] * x.itemsize).view(x.dtype).view(size, -1)
        tokens = torch.zeros(size + 1, dtype=torch.int64) if some else None
        with tape.recording():
            y = self._layers(inputs, cache, states, tokens)
        self._recordings[some] = _Recording(tape, inputs, tokens, states, cache, y)
        return self._recordings[some]
