"""What all formats of tool calls share: a machine that reads an answer and emits deltas."""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping
from typing import Any, ClassVar

from octavo.server.tools import json_text
from octavo.server.tools.deltas import Sink
from octavo.server.tools.marks import Marks
from octavo.server.tools.source import Malformed, Source, Steps

ARGUMENTS = ("arguments", "parameters")
# Left behind by a call whose arguments were whole: brackets and separators, which say nothing.
_LEFT_OVER = re.compile(r"[\s}\]),;`]+")

# Name -> the schema of its parameters, of the functions a request offers.
Tools = Mapping[str, Mapping[str, Any]]


class Format:
    """Reads one answer. Subclasses say how their format looks: ``MARKS`` and ``run``.

    The rules on malformed calls are here (docs/tools.md). A call begins with its first byte of
    arguments and is whole once they are; text that turns out to be no call is content.
    """

    name: ClassVar[str] = "none"
    MARKS: ClassVar[tuple[str, ...]] = ()
    # What begins a call; ends reasoning that has no end, too, where it is a token.
    BEGINS: ClassVar[tuple[str, ...]] = ()

    # A call as a model is told to write it, where its chat template does not say.
    EXAMPLE: ClassVar[str] = '{"name": NAME, "arguments": {…}}'

    def __init__(self, source: Source, sink: Sink, marks: Marks, tools: Tools) -> None:
        self.source = source
        self.sink = sink
        self.marks = marks
        self.tools = tools

    @staticmethod
    def new_id(name: str) -> str:
        """A fresh id of a call to function ``name``."""
        return f"call_{secrets.token_hex(12)}"

    def run(self) -> Steps[None]:
        """Reads to the end. The base class has no calls: all is content."""
        yield from self.content_until()

    # ---- parts of formats ----

    def content_until(self, *texts: str) -> Steps[str | None]:
        """Content up to one of the marks, which is read and returned (None at the end)."""
        found = yield from self.source.until(self.marks.watch(*texts), self.sink.content)
        return found

    def optional(self, text: str) -> Steps[bool]:
        """Reads the mark ``text`` if it comes next."""
        return (yield from self.source.literal(self.marks(text)))

    def end_mark(self, text: str) -> Steps[None]:
        """Reads the mark that ends calls, and white space or a bracket too many before it. Where
        it has been left out, that is content."""
        rest: list[str] = []
        yield from self.source.spaces(rest.append, _LEFT_OVER)
        if not (yield from self.optional(text)):
            self.sink.content("".join(rest))

    def expect(self, text: str) -> Steps[None]:
        yield from self.source.expect(self.marks(text))

    def attempt(self, steps: Steps[None], begin: str = "") -> Steps[bool]:
        """Reads what may be calls; what turns out to be none is content. ``begin``: the mark read
        before. Returns whether there was a call."""
        num_before = self.sink.num_ended
        self.source.record()
        try:
            yield from steps
        except Malformed:
            self.sink.abandon()
            rest = self.source.recorded()
            if self.sink.num_ended == num_before:
                self.sink.content(begin + rest)
            else:
                self.sink.content(_LEFT_OVER.sub("", rest, 1) if _LEFT_OVER.match(rest) else rest)
        else:
            self.source.recorded()
        return self.sink.num_ended > num_before

    def named(self, name: str) -> str:
        """A function's name as the model wrote it. Raises Malformed for none at all."""
        name = name.strip()
        if not name:
            raise Malformed("a call without a name")
        return name

    def known(self, name: str) -> str:
        """As ``named``, for formats without marks: only a function that the request offers."""
        if name not in self.tools:
            raise Malformed(f"no function {name!r}")
        return name

    def call(self, name: str, read: Steps[None], call_id: str | None = None) -> Steps[None]:
        """A call whose arguments ``read`` emits; what came before it is not content any more."""
        self.sink.start(name, call_id)
        yield from read
        self.end_call()

    def end_call(self) -> None:
        self.sink.end()
        self.source.record()

    def json_arguments(self, name: str, call_id: str | None = None) -> Steps[None]:
        """The call's arguments: a JSON object, the same written as a string, or null for none."""
        char = yield from self.source.peek()
        if char == "{":
            read = json_text.value(self.source, self.sink.arguments)
            yield from self.call(name, read, call_id)
            return
        if char == '"':
            text = (yield from json_text.decoded_string(self.source)).strip()
            text = text or "{}"
        else:
            text = yield from json_text.collected(self.source, json_text.value)
            text = "{}" if text == "null" else text
        self.emit_call(name, text, call_id)

    def emit_call(self, name: str, arguments: str, call_id: str | None = None) -> None:
        if not json_text.is_object(arguments):
            raise Malformed("arguments that are no object")
        self.sink.start(name, call_id)
        self.sink.arguments(arguments)
        self.end_call()

    def json_calls(self, strict: bool = False) -> Steps[None]:
        """An object that is a call, or a list of them. ``strict``: see ``call_object``."""
        if (yield from self.source.literal("[")):
            yield from self.source.spaces()
            if (yield from self.source.literal("]")):
                raise Malformed("no call")
            while True:
                yield from self.call_object(strict)
                yield from self.source.spaces()
                if not (yield from self.source.literal(",")):
                    break
                yield from self.source.spaces()
            yield from self.source.expect("]")
        else:
            yield from self.call_object(strict)

    def call_object(self, strict: bool = False) -> Steps[None]:
        """``{"name": …, "arguments": {…}}``, in any order, ``parameters`` for ``arguments``; other
        members are skipped. ``strict``: the name is first and one of the request's functions, so
        that an object which is no call is known at once."""
        source = self.source
        yield from source.expect("{")
        name: str | None = None
        held: str | None = None
        done = False
        yield from source.spaces()
        more = (yield from source.peek()) != "}"
        while more:
            key = yield from json_text.decoded_string(source)
            yield from source.spaces()
            yield from source.expect(":")
            yield from source.spaces()
            if key == "name" or (strict and key == "function"):
                if name is not None:
                    raise Malformed("two names")
                found = yield from json_text.decoded_string(source)
                name = self.known(found) if strict else self.named(found)
            elif key in ARGUMENTS and held is None and not done:
                if name is not None:
                    yield from self.json_arguments(name)
                    done = True
                elif strict:
                    raise Malformed("arguments before a name")
                else:
                    held = yield from json_text.collected(source, json_text.value)
            elif strict and not done and key not in ("type", "id"):
                raise Malformed(f"a member {key!r}")
            else:
                yield from json_text.collected(source, json_text.value)
            yield from source.spaces()
            more = yield from source.literal(",")
            yield from source.spaces()
        yield from source.expect("}")
        if name is None:
            raise Malformed("a call without a name")
        if not done:
            held = "{}" if held in (None, "null") else held
            assert held is not None
            if held.startswith('"'):
                held = (yield from json_text.decoded_string(Source(held, ended=True))) or "{}"
            self.emit_call(name, held)


class Tagged(Format):
    """A mark, a call or a list of calls as JSON, and an end mark that may be missing."""

    END: ClassVar[str] = ""

    def run(self) -> Steps[None]:
        while begin := (yield from self.content_until(*self.BEGINS)):
            if (yield from self.attempt(self._calls(), begin)):
                yield from self.end_mark(self.END)

    def _calls(self) -> Steps[None]:
        yield from self.source.spaces()
        yield from self.json_calls()


class Bare(Format):
    """Calls without marks: they begin a line (and perhaps follow a mark)."""

    OPENERS: ClassVar[str] = "{["

    def run(self) -> Steps[None]:
        at_line = True
        while True:
            if at_line:
                yield from self.source.spaces(self.sink.content)
                char = yield from self.source.peek()
                if char and char in self.OPENERS:
                    at_line = yield from self.attempt(self.calls())
                    if at_line:
                        continue
            mark = yield from self.content_until("\n", *self.BEGINS)
            if mark is None:
                return
            at_line = True
            if mark == "\n":
                self.sink.content(mark)
                continue
            at_line = yield from self.attempt(self._marked(), mark)

    def _marked(self) -> Steps[None]:
        yield from self.source.spaces()
        yield from self.calls()

    def calls(self) -> Steps[None]:
        """One or several calls, from their first character."""
        raise NotImplementedError
