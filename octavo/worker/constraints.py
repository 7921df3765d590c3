"""Constraints: the matchers of slots whose output must follow a grammar, and their masks.

Before a draw ``fill`` writes the masks of the rows that draw, after it ``advance`` takes what they
drew. Both are the host's: a GPU's logits wait for the masks, its forward does not.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from octavo.core.plan import NewRequest
from octavo.grammar.grammars import Grammars
from octavo.grammar.matcher import Matcher, compute_together

Int32 = NDArray[np.int32]


class Constraints:
    """By slot. ``masks``: int32 [max_slots, words], a bit per id that may be drawn next; valid in
    the rows of slots that ``fill`` was called with."""

    def __init__(self, max_slots: int, vocab_size: int, grammars: Grammars | None) -> None:
        # Untouched zeros take no memory: only the slots that use their rows do.
        self.masks: Int32 = np.zeros((max_slots, -(-vocab_size // 32)), dtype=np.int32)
        self._grammars = grammars
        self._matchers: dict[int, Matcher] = {}

    def __bool__(self) -> bool:
        return bool(self._matchers)

    def place(self, new: NewRequest, ids: Int32) -> None:
        """A request takes a slot; ``ids`` are all that are known of it."""
        assert self._grammars is not None, "this worker was started without grammars"
        self._matchers[new.slot] = self._grammars.matcher(
            new.grammar,
            ids[new.prompt_len :].tolist(),
            after=new.grammar_after,
            allowed_ids=new.params.allowed_token_ids,
            ignore_eos=new.params.ignore_eos,
        )

    def free(self, slot: int) -> None:
        self._matchers.pop(slot, None)

    def of(self, slots: Sequence[int]) -> list[Matcher | None]:
        """The matchers of what these slots draw now, whoever has the slots later."""
        return [self._matchers.get(slot) for slot in slots]

    def fill(self, slots: Sequence[int]) -> None:
        """Masks for the next draws of these slots."""
        pairs = [(slot, self._matchers[slot]) for slot in slots if slot in self._matchers]
        compute_together([matcher for _, matcher in pairs])
        for slot, matcher in pairs:
            if not matcher.fill(self.masks[slot]):
                self.masks[slot] = -1  # it has ended: what is drawn now is dropped


def advance(
    matchers: Sequence[Matcher | None], tokens: Sequence[int]
) -> tuple[dict[int, str], list[int]]:
    """What rows drew by the masks of ``fill``, for their matchers.

    Returns the indices of those that have come to their end just now, with "" for an output that is
    complete and else why it cannot go on; and of these the ones whose token does not count.
    """
    ends: dict[int, str] = {}
    dropped: list[int] = []
    for index, (matcher, token) in enumerate(zip(matchers, tokens)):
        if matcher is None or matcher.told:
            continue
        had_ended = matcher.done
        matcher.consume(token)
        if matcher.done:
            matcher.told = True
            ends[index] = matcher.failure
            if had_ended or matcher.failure:
                dropped.append(index)
    return ends, dropped
