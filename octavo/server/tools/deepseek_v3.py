"""DeepSeek's: between ``<｜tool▁calls▁begin｜>`` and ``<｜tool▁calls▁end｜>`` one block per call.
R1 and V3 write ``function<｜tool▁sep｜>f``, a line break and the arguments in a fenced block, V3.1
``f<｜tool▁sep｜>{…}``."""

from __future__ import annotations

import re

from octavo.server.tools.format import Format
from octavo.server.tools.source import Steps

CALLS_BEGIN, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL_BEGIN, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
SEPARATOR = "<｜tool▁sep｜>"
_NAME = re.compile("[^\\s<{`\ud800-\udfff]+")
_LANGUAGE = re.compile("[A-Za-z]+")


class DeepSeekV3(Format):
    name = "deepseek_v3"
    MARKS = (CALLS_BEGIN, CALLS_END, CALL_BEGIN, CALL_END, SEPARATOR)
    BEGINS = (CALLS_BEGIN, CALL_BEGIN)

    def run(self) -> Steps[None]:
        inside = False  # of the list of calls, where line breaks are no content
        while True:
            if inside:
                yield from self.source.spaces()
            mark = yield from self.content_until(CALLS_BEGIN, CALL_BEGIN, CALLS_END)
            if mark is None:
                return
            is_call = mark == self.marks(CALL_BEGIN)
            if is_call and (yield from self.attempt(self._call(), mark)):
                yield from self.end_mark(CALL_END)
            inside = mark != self.marks(CALLS_END)

    def _call(self) -> Steps[None]:
        name = yield from self.source.word(_NAME, 256)
        yield from self.expect(SEPARATOR)
        yield from self.source.spaces()
        fenced = False
        if (yield from self.source.peek()) not in ("{", '"'):
            fenced = yield from self.source.literal("```")
            if not fenced:  # what came was the kind: "function"
                name = yield from self.source.word(_NAME, 256)
                yield from self.source.spaces()
                fenced = yield from self.source.literal("```")
        if fenced:
            yield from self.source.word(_LANGUAGE, 32)
            yield from self.source.spaces()
        yield from self.json_arguments(self.named(name))
        if fenced:
            yield from self.source.spaces()
            yield from self.source.expect("```")
