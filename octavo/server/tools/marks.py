"""The marks of a format (``<tool_call>``, ``[TOOL_CALLS]`` …) in a given vocabulary.

Where the vocabulary has a mark as a token, only that token counts: ordinary text that spells it is
text. To that end the answer's text shows such a token as one character of the surrogate range,
which no decoded text holds. Where the vocabulary has it not, the spelled text counts.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable
from functools import cached_property, lru_cache

from octavo.server.tools.source import Watch

_FIRST = 0xDC00


class Marks:
    """``mark(text)`` is what the text of an answer shows for a mark."""

    def __init__(
        self,
        texts: Iterable[str],
        id_of: Callable[[str], int | None] = lambda text: None,
        special: Container[int] = (),
    ) -> None:
        """``id_of``: the id of an added token, or None. ``special``: ids that are left out of
        text unless a client wants them."""
        self._chars: dict[str, str] = {}
        self.tokens: dict[int, str] = {}  # id -> the character that stands for it
        self.ids: dict[str, int] = {}  # text -> id, of marks that are tokens
        self._special: set[str] = set()
        self.watch = lru_cache(maxsize=None)(self._watch)
        for text in dict.fromkeys(texts):
            index = id_of(text)
            if index is not None:
                char = self.tokens.setdefault(index, chr(_FIRST + len(self.tokens)))
                self._chars[text] = char
                self.ids[text] = index
                if index in special:
                    self._special.add(char)

    def __call__(self, text: str) -> str:
        return self._chars.get(text, text)

    def is_token(self, text: str) -> bool:
        return text in self.ids

    def _watch(self, *texts: str) -> Watch:
        return Watch([self(text) for text in texts])

    @cached_property
    def soft(self) -> dict[str, str]:
        """Marks that are no special tokens: inside a string they are text, because a tokenizer
        makes the token of text that spells it, too."""
        return {c: text for text, c in self._chars.items() if c not in self._special}

    def raw(self, skip_special: bool) -> dict[int, str]:
        """What a text shows for each mark that no format took: as if there were no parser."""
        return {
            ord(char): "" if skip_special and char in self._special else text
            for text, char in self._chars.items()
        }

    def spelled(self, text: str) -> str:
        """``text``, in which marks that are tokens are to be found as tokens."""
        for mark, char in self._chars.items():
            text = text.replace(mark, char)
        return text
