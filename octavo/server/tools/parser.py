"""The machine that reads one answer: reasoning first, then content and calls."""

from __future__ import annotations

from octavo.server.tools.deltas import Delta, Sink
from octavo.server.tools.format import Format, Tools
from octavo.server.tools.marks import Marks
from octavo.server.tools.reasoning import Reasons
from octavo.server.tools.source import Source, Steps


class AnswerParser:
    """Fed with the text of an answer, in which marks that are tokens are single characters
    (``Marks``). What ``feed`` and ``finish`` return, added up, does not depend on how the text was
    cut. Never raises, and takes time linear in the text."""

    def __init__(
        self,
        marks: Marks,
        format: type[Format],
        reasoning: type[Reasons] | None = None,
        tools: Tools | None = None,
        *,
        in_reasoning: bool | None = None,
        most_calls: int | None = None,
        skip_special: bool = True,
    ) -> None:
        """``in_reasoning``: whether the prompt ended inside of reasoning; None: it does not say.
        ``most_calls``: further ones are dropped. ``skip_special``: special tokens that no format
        took are left out, as of any text."""
        self._source = Source(soft=marks.soft)
        self.sink = Sink(marks.raw(skip_special), format.new_id, most_calls)
        self._format = format(self._source, self.sink, marks, tools or {})
        self._reasons = None
        if reasoning is not None:
            self._reasons = reasoning(self._source, self.sink, marks, format.BEGINS, in_reasoning)
        self._steps = self._run()
        self._ended = False

    def feed(self, text: str) -> list[Delta]:
        """What this much more of the text says."""
        if text and not self._ended:
            self._source.push(text)
            next(self._steps)
        return self.sink.take()

    def finish(self) -> list[Delta]:
        """What the end of the text says; nothing the second time."""
        if not self._ended:
            self._ended = True
            self._source.ended = True
            for _ in self._steps:
                raise AssertionError("a parser waits for more of a text that has ended")
            self.sink.finish()
        return self.sink.take()

    def _run(self) -> Steps[None]:
        if self._reasons is not None:
            yield from self._reasons.run()
        yield from self._format.run()
        assert self._source.ended
