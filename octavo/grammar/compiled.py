"""llguidance's side: its tokenizer, its limits, and a grammar's text compiled for them.

The only module that imports llguidance. The checker (in a process of its own) and the engine use
the same, so that what one takes the other takes too.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cached_property

import llguidance
import numpy as np
from numpy.typing import NDArray

from octavo.grammar.vocabulary import Vocabulary

# A grammar that exceeds these is refused when it is checked, or ends its own request when it is
# followed. At llguidance's speeds: 100 ms for the first regexes, 15 ms for a mask.
INITIAL_FUEL = 300_000
STEP_FUEL = 200_000
STEP_ITEMS = 50_000
LEXER_STATES = 50_000


class _Table:
    """The vocabulary as llguidance's wrapper wants it."""

    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.tokens = vocabulary.tokens
        # An EOS that is not flagged special must not be spelled in the middle of a text either.
        self.special_token_ids = sorted({*vocabulary.special_ids, *vocabulary.eos_ids})
        self.eos_token_id = vocabulary.eos_ids[0] if vocabulary.eos_ids else None

    def __call__(self, text: bytes) -> Sequence[int]:
        raise AssertionError("nothing is forced, so no text needs to be cut into tokens")


class Compiler:
    """Compiles grammars for one vocabulary. To build it holds the interpreter for some 100 ms
    (a vocabulary of 150,000 tokens); to compile lets other threads run."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        wrapper = llguidance.TokenizerWrapper(_Table(vocabulary))
        eos = vocabulary.eos_ids or None
        self._tokenizer = llguidance.LLTokenizer(wrapper, eos_token=eos)
        # A vocabulary without EOS gets one more token that stands for it.
        self.mask_words = -(-self._tokenizer.vocab_size // 32)
        self._limits = llguidance.LLParserLimits(
            initial_lexer_fuel=INITIAL_FUEL,
            step_lexer_fuel=STEP_FUEL,
            step_max_items=STEP_ITEMS,
            max_lexer_states=LEXER_STATES,
            verbose_errors=False,
        )

    def compile(self, text: str) -> llguidance.LLMatcher:
        """A matcher at its start; in its error state where the grammar is wrong."""
        return llguidance.LLMatcher(self._tokenizer, text, log_level=0, limits=self._limits)

    def compute_masks(self, matchers: list[llguidance.LLMatcher], masks: NDArray[np.int32]) -> None:
        """The next mask of each matcher (no two the same), in int32 [matchers, mask_words]."""
        pairs = [(matcher, row) for row, matcher in enumerate(matchers)]
        address, size = masks.ctypes.data, 4 * masks.shape[1]
        self._threads.unsafe_compute_mask_ptr(pairs, address, size, len(masks))

    @cached_property
    def _threads(self) -> llguidance.LLExecutor:
        return llguidance.LLExecutor()

    def problem(self, text: str) -> str:
        """Why this grammar cannot be used, in a line or a few; "" for one that can."""
        matcher = self.compile(text)
        if matcher.is_error():
            return tidy(matcher.get_error())
        if warnings := matcher.get_grammar_warnings():  # of what would not be enforced
            return "; ".join(warnings)
        mask = matcher.compute_bitmask()
        if matcher.is_error():
            return f"nothing matches it ({tidy(matcher.get_error()) or matcher.stop_reason()})"
        bits = int.from_bytes(mask, "little")
        for index in self.vocabulary.eos_ids or [len(self.vocabulary.tokens)]:
            bits &= ~(1 << index)
        return "" if bits else "only the empty text matches it"


def tidy(message: str) -> str:
    """An error of llguidance without the lines that show where in its own text it was: of a
    client's regex or schema that is not what the client sent."""
    lines = message.partition("<non-verbose/>")[0].splitlines()
    kept = [line for line in lines if not _QUOTED.match(line)]
    text = "\n".join(kept).strip()
    return ONE_OF if text.endswith(_ONE_OF) else text


_ONE_OF = "Enable 'coerce_one_of' option to approximate oneOf with anyOf"
ONE_OF = (
    "oneOf is followed only where no value can match two of its options, and that can be seen: by "
    "their types, or by a required property that is another constant in each; else use anyOf"
)
_QUOTED = re.compile(r"\s+\d+ \| |\s+\^\s*$")
