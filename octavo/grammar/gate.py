"""Gate: keeps a grammar waiting until a marker has been written (``</think>``).

Before the marker every token may come but two kinds: those that end the output, and those that
would run past the marker's end, whose tail the grammar would never see.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from octavo.grammar.vocabulary import Vocabulary

Int32 = NDArray[np.int32]


class Marker:
    """A marker in one vocabulary; shared by all gates that wait for it."""

    def __init__(self, text: str, vocabulary: Vocabulary) -> None:
        self.bytes = text.encode()
        self.tokens = vocabulary.tokens
        self._eos = vocabulary.eos_ids
        self._words = vocabulary.words
        self._falls = _fall_backs(self.bytes)
        self._masks: dict[int, Int32] = {}

    def advance(self, state: int, data: bytes) -> tuple[int, int]:
        """(bytes of the marker that the output ends in, -1; or its length and the index in ``data``
        behind it, once it is complete). ``state``: how many there were before ``data``."""
        marker, falls = self.bytes, self._falls
        for index, byte in enumerate(data):
            while state and marker[state] != byte:
                state = falls[state - 1]
            state += marker[state] == byte
            if state == len(marker):
                return state, index + 1
        return state, -1

    def mask(self, state: int) -> Int32:
        """Which ids may come where the output ends in ``state`` bytes of the marker."""
        found = self._masks.get(state)
        if found is None:
            found = self._masks[state] = self._make_mask(state)
        return found

    def _make_mask(self, state: int) -> Int32:
        allowed = np.zeros(self._words * 32, dtype=np.bool_)
        allowed[: len(self.tokens)] = True
        allowed[self._eos] = False
        last = self.bytes[-1]
        for index, data in enumerate(self.tokens):
            if last in data[:-1]:
                end = self.advance(state, data)[1]
                if 0 <= end < len(data):
                    allowed[index] = False
        return np.packbits(allowed, bitorder="little").view("<i4")


def _fall_backs(marker: bytes) -> list[int]:
    """At i: the length of the longest proper prefix of the marker that marker[: i + 1] ends in
    (Knuth, Morris and Pratt)."""
    falls, length = [0] * len(marker), 0
    for index in range(1, len(marker)):
        while length and marker[length] != marker[index]:
            length = falls[length - 1]
        length += marker[length] == marker[index]
        falls[index] = length
    return falls


class Gate:
    """One sequence's."""

    def __init__(self, marker: Marker) -> None:
        self._marker = marker
        self._state = 0

    def mask(self) -> Int32:
        return self._marker.mask(self._state)

    def push(self, token: int) -> bool:
        """Whether this token completed the marker. Raises ValueError if it ran past its end."""
        data = self._marker.tokens[token]
        self._state, end = self._marker.advance(self._state, data)
        if 0 <= end < len(data):
            raise ValueError(f"token {token} runs past the end of {self._marker.bytes!r}")
        return end >= 0

    def reset(self) -> None:
        self._state = 0
