"""``[f(a=1, b="x"), g()]``: a Python list of calls, as Llama 3.2 and 4, ToolACE and others write
it, at the beginning of a line or between ``<|python_start|>`` and ``<|python_end|>``."""

from __future__ import annotations

import re

from octavo.server.tools import python_text
from octavo.server.tools.format import Bare
from octavo.server.tools.json_text import written
from octavo.server.tools.source import Malformed, Steps

_NAME = re.compile(r"[A-Za-z_][\w.-]*|[\w.-]+")


class Pythonic(Bare):
    name = "pythonic"
    MARKS = ("<|python_start|>", "<|python_end|>", "<|python_tag|>")
    BEGINS = ("<|python_start|>", "<|python_tag|>")
    OPENERS = "["
    EXAMPLE = "[NAME(PARAMETER=VALUE, …)]"

    def calls(self) -> Steps[None]:
        source = self.source
        yield from source.expect("[")
        while True:
            yield from source.spaces()
            name = self.known((yield from source.word(_NAME, 256)))
            yield from source.spaces()
            yield from source.expect("(")
            yield from self.call(name, self._arguments(name))
            yield from source.spaces()
            if not (yield from source.literal(",")):
                break
        yield from source.expect("]")
        yield from self.end_mark("<|python_end|>")

    def _arguments(self, name: str) -> Steps[None]:
        """Up to the closing parenthesis, as a JSON object."""
        source, emit = self.source, self.sink.arguments
        properties = list(self.tools[name].get("properties") or ())
        emit("{")
        place = 0
        seen: set[str] = set()
        while True:
            yield from source.spaces()
            if (yield from source.literal(")")):
                emit("}")
                return
            if place:
                emit(", ")
            key = yield from self._key(properties, place)
            if key in seen:
                raise Malformed(f"two values for {key!r}")
            seen.add(key)
            emit(f"{written(key)}: ")
            yield from python_text.value(source, emit)
            place += 1
            yield from source.spaces()
            if not (yield from source.literal(",")):
                yield from source.expect(")")
                emit("}")
                return

    def _key(self, properties: list[str], place: int) -> Steps[str]:
        """The name before ``=``; of a positional argument, that of the schema's property."""
        char = yield from self.source.peek()
        if char.isalpha() or char == "_":
            word = yield from self.source.word(_NAME, 256)
            yield from self.source.spaces()
            yield from self.source.expect("=")
            yield from self.source.spaces()
            return word
        if place >= len(properties):
            raise Malformed("an argument without a name")
        return properties[place]
