"""How models set what they think apart from what they answer.

Reasoning stands at the beginning of an answer. Line breaks around it are not part of it. Where a
model calls a tool without having ended its reasoning, the call's mark ends it, provided that the
mark is a token.
"""

from __future__ import annotations

import re
from typing import ClassVar

from octavo.server.tools.deltas import Sink
from octavo.server.tools.marks import Marks
from octavo.server.tools.source import Source, Steps, Watch

_BREAKS = re.compile(r"[\r\n]+")
_TRAILING = re.compile(r"[\r\n]+\Z")


class Reasons:
    """Reads the reasoning at the beginning of an answer and leaves the rest to the format.
    This class: between two marks."""

    name: ClassVar[str]
    BEGIN: ClassVar[str] = "<think>"
    END: ClassVar[str] = "</think>"
    # Where the prompt does not say: whether an answer begins inside of reasoning.
    AT_ONCE: ClassVar[bool] = False

    @classmethod
    def all_marks(cls) -> tuple[str, ...]:
        return (cls.BEGIN, cls.END)

    def __init__(
        self,
        source: Source,
        sink: Sink,
        marks: Marks,
        call_marks: tuple[str, ...],
        inside: bool | None,
    ) -> None:
        """``inside``: whether the prompt ended inside of reasoning (None: it does not say)."""
        self.source, self.sink, self.marks = source, sink, marks
        self.call_marks = [marks(text) for text in call_marks]
        self.calls = [marks(text) for text in call_marks if marks.is_token(text)]
        self.inside = inside
        self._breaks: list[str] = []

    def run(self) -> Steps[None]:
        if self.inside is True or (yield from self._begins()):
            yield from self.body(self.END)

    def _begins(self) -> Steps[bool]:
        """Reads the mark that begins reasoning, white space before it included."""
        yield from self.source.spaces(self.sink.content)
        if (yield from self.source.literal(self.marks(self.BEGIN))):
            self.sink.drop_space()
            return True
        if self.AT_ONCE and self.inside is None and (yield from self.source.peek()):
            self.sink.drop_space()
            return True
        return False

    def body(self, *ends: str) -> Steps[None]:
        """Reasoning up to one of the marks, or to that of a call, which is left to be read."""
        yield from self.skip_breaks()
        if (yield from self.source.literal(self.marks(self.BEGIN))):  # though the prompt has it
            yield from self.skip_breaks()
        watch = Watch([*map(self.marks, ends), *self.calls])
        found = yield from self.source.until(watch, self._emit)
        if found in self.calls:
            self.source.put_back(found)
        elif found is not None:
            yield from self.skip_breaks()
        elif self._breaks:  # the answer ended inside: all of it is reasoning
            self.sink.reasoning("".join(self._breaks))
        self._breaks.clear()

    def _emit(self, text: str) -> None:
        """Line breaks are held until they are known not to be the last."""
        found = _TRAILING.search(text)
        end = found.start() if found else len(text)
        if end:
            self.sink.reasoning("".join((*self._breaks, text[:end])))
            self._breaks.clear()
        if found:
            self._breaks.append(found[0])

    def skip_breaks(self) -> Steps[None]:
        while (yield from self.source.peek()) in ("\n", "\r"):
            self.source.run(_BREAKS)


class DeepSeekR1(Reasons):
    """The answer begins inside of reasoning, whether or not the prompt has opened it."""

    name = "deepseek_r1"
    AT_ONCE = True


class Qwen3(Reasons):
    """Hybrid models: reasoning is there when the answer, or the prompt before it, opens it."""

    name = "qwen3"


class GraniteReasons(Reasons):
    """Granite 3.2 writes sentences, 3.3 marks, with the answer between marks of its own."""

    name = "granite"
    RESPONSE: ClassVar[tuple[str, str]] = ("<response>", "</response>")
    BEGINS: ClassVar[tuple[str, ...]] = (
        "Here is my thought process:",
        "Here's my thought process:",
    )
    ENDS: ClassVar[tuple[str, ...]] = ("Here is my response:", "Here's my response:")

    @classmethod
    def all_marks(cls) -> tuple[str, ...]:
        return (*super().all_marks(), *cls.RESPONSE)

    def run(self) -> Steps[None]:
        ends: tuple[str, ...] = (self.END,)
        if self.inside is not True and not (yield from self._begins()):
            for sentence in self.BEGINS:
                if (yield from self.source.literal(sentence)):
                    break
            else:
                return
            self.sink.drop_space()
            ends = self.ENDS
        yield from self.body(*ends)
        begin, end = map(self.marks, self.RESPONSE)
        if (yield from self.source.literal(begin)):
            watch = Watch([end, *self.call_marks])
            found = yield from self.source.until(watch, self.sink.content)
            if found in self.call_marks:
                self.source.put_back(found)
