"""What a parser says of an answer while it comes, and how that adds up to a message."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field

# Stand for marks that are tokens (``marks``): no decoded text holds one.
MARK = re.compile("[\ud800-\udfff]")


@dataclass(slots=True)
class Content:
    text: str


@dataclass(slots=True)
class Reasoning:
    text: str


@dataclass(slots=True)
class CallStart:
    """Its first bytes of arguments follow at once."""

    index: int
    id: str
    name: str


@dataclass(slots=True)
class Arguments:
    """More of the JSON text of a call's arguments: what came so far is the beginning of an
    object, and a whole one only when the call ends."""

    index: int
    text: str


@dataclass(slots=True)
class CallEnd:
    """``whole``: the arguments are a JSON object. Otherwise it was no call, and its raw text
    follows as content."""

    index: int
    whole: bool


Delta = Content | Reasoning | CallStart | Arguments | CallEnd


class Sink:
    """Where a parser puts what it reads. White space of the content that only surrounds calls is
    left out: it is held until something else follows."""

    def __init__(
        self, raw: dict[int, str], new_id: Callable[[str], str], most_calls: int | None = None
    ) -> None:
        """``raw``: what stands for a mark in the text (``str.translate``). Calls beyond
        ``most_calls`` are dropped."""
        self._raw = raw
        self._new_id = new_id
        self._most_calls = most_calls
        self._deltas: list[Delta] = []
        self._texts: list[str] = []  # of the delta that is growing
        self._make: Callable[[str], Delta] = Content
        self._space: list[str] = []
        self._after_call = False  # nothing but white space came since the last call
        self._open = -1
        self._dropping = False
        self.num_started = 0
        self.num_ended = 0  # whole ones, also those that were dropped
        self.num_whole = 0
        self.has_content = False

    def take(self) -> list[Delta]:
        self._close()
        deltas, self._deltas = self._deltas, []
        return deltas

    def raw(self, text: str) -> str:
        """``text`` with its marks as the text of an answer shows them."""
        return text.translate(self._raw) if MARK.search(text) else text

    def content(self, text: str) -> None:
        text = self.raw(text)
        if not text:
            return
        end = len(text.rstrip())
        if end:
            shown = "".join((*self._space, text[:end]))
            self._space.clear()
            self._after_call = False
            self.has_content = True
            self._grow(Content, shown)
        if end < len(text):
            self._space.append(text[end:])

    def drop_space(self) -> None:
        """Leaves out the white space that content ended with so far."""
        self._space.clear()

    def reasoning(self, text: str) -> None:
        if text := self.raw(text):
            self._grow(Reasoning, text)

    def start(self, name: str, call_id: str | None = None) -> None:
        """A call begins. ``arguments`` and ``end`` are of this one."""
        self._space.clear()
        self._dropping = self._most_calls is not None and self.num_whole >= self._most_calls
        if self._dropping:
            return
        self._open = self.num_started
        self.num_started += 1
        self._add(CallStart(self._open, call_id or self._new_id(name), name))

    def arguments(self, text: str) -> None:
        if not self._dropping:
            self._grow(self._arguments, text)

    def _arguments(self, text: str) -> Arguments:
        return Arguments(self._open, text)

    def end(self) -> None:
        self._after_call = True
        self.num_ended += 1
        if self._dropping:
            self._dropping = False
            return
        self._add(CallEnd(self._open, whole=True))
        self.num_whole += 1
        self._open = -1

    def abandon(self) -> None:
        """Drops the open call, if there is one: it turned out not to be a call."""
        self._dropping = False
        if self._open >= 0:
            self._add(CallEnd(self._open, whole=False))
            self._open = -1

    def finish(self) -> None:
        if self._space and not self._after_call:
            self._grow(Content, "".join(self._space))
        self._space.clear()

    def _add(self, delta: Delta) -> None:
        self._close()
        self._deltas.append(delta)

    def _grow(self, make: Callable[[str], Delta], text: str) -> None:
        """More text of the last delta, or a new one of another kind."""
        if make != self._make:
            self._close()
            self._make = make
        self._texts.append(text)

    def _close(self) -> None:
        if self._texts:
            self._deltas.append(self._make("".join(self._texts)))
            self._texts.clear()


@dataclass(slots=True)
class Call:
    id: str
    name: str
    parts: list[str] = field(default_factory=list)

    @property
    def arguments(self) -> str:
        return "".join(self.parts)


class Message:
    """The sum of deltas: the whole answer, from the same machine that streams it."""

    def __init__(self) -> None:
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self.calls: dict[int, Call] = {}  # by index; whole ones once it has ended

    @property
    def content(self) -> str:
        return "".join(self._content)

    @property
    def reasoning(self) -> str:
        return "".join(self._reasoning)

    def add(self, deltas: list[Delta]) -> None:
        for delta in deltas:
            if isinstance(delta, Content):
                self._content.append(delta.text)
            elif isinstance(delta, Reasoning):
                self._reasoning.append(delta.text)
            elif isinstance(delta, CallStart):
                self.calls[delta.index] = Call(delta.id, delta.name)
            elif isinstance(delta, Arguments):
                self.calls[delta.index].parts.append(delta.text)
            elif not delta.whole:
                del self.calls[delta.index]
