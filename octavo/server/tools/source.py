"""Text that comes in pieces, read by generators.

A parser is a generator that yields whenever it needs more text; ``Source`` holds what it has not
read yet, which is never more than what it waits to decide on. So what a parser does depends on the
text alone, never on how it was cut, and each character is looked at a bounded number of times.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Sequence
from typing import TypeVar

T = TypeVar("T")
Steps = Generator[None, None, T]

SPACE = re.compile(r"[ \t\r\n]+")


class Malformed(Exception):
    """What was read is not what the format says."""


class Watch:
    """Strings to look for. None of them is the beginning of another."""

    def __init__(self, texts: Sequence[str]) -> None:
        either = "|".join(map(re.escape, texts))
        self.pattern = re.compile(either) if texts else None
        self.beginnings = frozenset(text[:end] for text in texts for end in range(1, len(text)))
        self.longest = max(map(len, self.beginnings), default=0)

    def num_held(self, text: str) -> int:
        """Characters at the end of ``text`` that may begin one of the strings."""
        for length in range(min(self.longest, len(text)), 0, -1):
            if text[-length:] in self.beginnings:
                return length
        return 0


class Source:
    """``soft``: marks that are text where a text is being read (in a JSON string): char -> text."""

    __slots__ = ("_at", "_record", "_text", "ended", "soft")

    def __init__(self, text: str = "", ended: bool = False, soft: dict[str, str] | None = None):
        self._text = text
        self._at = 0
        self._record: list[str] | None = None
        self.ended = ended
        self.soft = soft or {}

    def push(self, text: str) -> None:
        self._text = self._text[self._at :] + text
        self._at = 0

    # ---- what was read, in case it turns out to be no call ----

    def record(self) -> None:
        """Begins to keep what is read."""
        self._record = []

    def recorded(self) -> str:
        """What was read since ``record``; ends it."""
        text, self._record = "".join(self._record or ()), None
        return text

    # ---- reading ----

    def take(self, count: int) -> str:
        """The next ``count`` characters, which must be there."""
        end = self._at + count
        text = self._text[self._at : end]
        self._at = end
        if self._record is not None:
            self._record.append(text)
        return text

    def put_back(self, text: str) -> None:
        """Undoes the reading of ``text``, which was just read."""
        assert self._record is None
        self._at -= len(text)

    def run(self, pattern: re.Pattern[str]) -> str:
        """What ``pattern`` matches in the text that is there; "" when nothing."""
        found = pattern.match(self._text, self._at)
        return self.take(found.end() - self._at) if found else ""

    def peek(self, count: int = 1) -> Steps[str]:
        """The next ``count`` characters, fewer only at the end of the text. Nothing is read."""
        while len(self._text) - self._at < count and not self.ended:
            yield
        return self._text[self._at : self._at + count]

    def follows(self, text: str) -> Steps[bool]:
        """Whether ``text`` comes next; decided by its first character that differs."""
        for length in range(1, len(text) + 1):
            if (yield from self.peek(length)) != text[:length]:
                return False
        return True

    def literal(self, text: str) -> Steps[bool]:
        """Reads ``text`` if it comes next."""
        found = yield from self.follows(text)
        if found:
            self.take(len(text))
        return found

    def spaces(
        self, emit: Callable[[str], object] | None = None, kinds: re.Pattern[str] = SPACE
    ) -> Steps[None]:
        """Reads white space (or other ``kinds`` of characters)."""
        while True:
            run = self.run(kinds)
            if run and emit is not None:
                emit(run)
            if self._at < len(self._text) or self.ended:
                return
            yield

    def expect(self, text: str) -> Steps[None]:
        if not (yield from self.literal(text)):
            raise Malformed(f"no {text!r}")

    def until(self, watch: Watch, emit: Callable[[str], object]) -> Steps[str | None]:
        """Emits text up to the first of the watched strings, which is read and returned; None at
        the end of the text."""
        while True:
            text = self._text
            found = watch.pattern.search(text, self._at) if watch.pattern else None
            if found:
                if found.start() > self._at:
                    emit(self.take(found.start() - self._at))
                self.take(len(found[0]))
                return found[0]
            held = 0 if self.ended else watch.num_held(text[self._at :])
            if len(text) - held > self._at:
                emit(self.take(len(text) - held - self._at))
            if self.ended:
                return None
            yield

    def word(self, pattern: re.Pattern[str], most: int) -> Steps[str]:
        """All characters that ``pattern`` (one or more of a kind) matches, at most ``most``."""
        parts, size = [], 0
        while True:
            run = self.run(pattern)
            parts.append(run)
            size += len(run)
            if size > most:
                raise Malformed(f"more than {most} characters")
            if self._at < len(self._text) or self.ended:
                return "".join(parts)
            yield
