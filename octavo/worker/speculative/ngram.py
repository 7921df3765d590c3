"""n-grams: what followed the last tokens where they last stood before in the same request.

The idea is prompt lookup decoding (A. Saxena, 2023). The longest match counts, and of equally long
ones the latest. As many tokens are guessed as were matched: a long match goes on for longer.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from octavo.worker.slots import Slots
from octavo.worker.speculative.proposer import Silent

Int32 = NDArray[np.int32]
NOTHING = np.zeros(0, dtype=np.int32)


def continuation(
    text: Int32, pattern: Int32, shortest: int, longest: int, most: int
) -> tuple[Int32, int]:
    """What follows in ``text`` where the longest suffix of ``pattern`` stands, of ``shortest`` to
    ``longest`` ids, at most ``most`` ids; and how many ids were matched (0: none).

    The match may end anywhere but at the end of ``text``. Where the text ends before the guesses
    do, what follows the match is repeated: so a text of period p is continued with period p.
    """
    longest = min(longest, len(pattern))
    if longest < shortest or len(text) < 2:
        return NOTHING, 0
    ends = np.flatnonzero(text[:-1] == pattern[-1])
    matched, found = 1, ends
    while matched < longest and len(found):
        behind = found - matched
        behind = behind[behind >= 0]
        kept = behind[text[behind] == pattern[-1 - matched]]
        if not len(kept):
            break
        found, matched = kept + matched, matched + 1
    if not len(found) or matched < shortest:
        return NOTHING, 0
    following = text[int(found[-1]) + 1 :]
    return following[np.arange(most) % len(following)], matched


class NgramProposer(Silent):
    def __init__(self, slots: Slots, shortest: int, longest: int) -> None:
        """``shortest``, ``longest``: ids that must, and can, be matched."""
        self._slots = slots
        self._shortest, self._longest = shortest, longest

    def propose(self, slots: Int32, most: Int32) -> tuple[Int32, Int32]:
        counts = np.zeros(len(slots), dtype=np.int32)
        ids = np.zeros((len(slots), int(most.max(initial=0))), dtype=np.int32)
        for row, slot in enumerate(slots.tolist()):
            guessed = self.continued(slot, int(most[row]))[0]
            counts[row] = len(guessed)
            ids[row, : len(guessed)] = guessed
        return counts, ids

    def continued(self, slot: int, most: int) -> tuple[Int32, int]:
        """(guesses, ids matched) for one slot."""
        known = self._slots.history_host[slot, : self._slots.length[slot]]
        found, matched = continuation(known, known, self._shortest, self._longest, most)
        return found[:matched], matched
