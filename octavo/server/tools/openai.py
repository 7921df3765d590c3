"""Harmony, the format of gpt-oss: an answer is messages, each with a channel in its header.

``analysis`` is reasoning, ``final`` content; a ``commentary`` without a recipient is content, too
(what the model says before it calls). A message ``to=functions.f`` is a call; one to a tool that
the request does not offer (``to=python``) is reasoning.
"""

from __future__ import annotations

import re

from octavo.server.tools.deltas import MARK
from octavo.server.tools.format import Format
from octavo.server.tools.source import Steps

START, CHANNEL, CONSTRAIN = "<|start|>", "<|channel|>", "<|constrain|>"
MESSAGE, END, RETURN, CALL = "<|message|>", "<|end|>", "<|return|>", "<|call|>"
_RECIPIENT = re.compile(r"\bto=([^\s<\ud800-\udfff]+)")
_CHANNEL = re.compile(r"\s*(\w+)")
_MOST_OF_HEADER = 1000


class OpenAI(Format):
    name = "openai"
    MARKS = (START, CHANNEL, CONSTRAIN, MESSAGE, END, RETURN, CALL)

    def run(self) -> Steps[None]:
        self._reasoned = self._said = False
        self._ends = self.marks.watch(END, RETURN, CALL, START, CHANNEL)
        mark = yield from self.content_until(START, CHANNEL, END, RETURN, CALL)
        while mark is not None:
            if mark in (self.marks(START), self.marks(CHANNEL)):
                mark = yield from self._message(mark)
            else:
                mark = yield from self.content_until(START, CHANNEL, END, RETURN, CALL)

    def _message(self, begin: str) -> Steps[str | None]:
        """A header and a body; returns the mark that ended it."""
        parts: list[str] = [begin]
        watch = self.marks.watch(MESSAGE, END, RETURN, CALL, START)
        found = yield from self.source.until(watch, parts.append)
        header = "".join(parts)
        if found != self.marks(MESSAGE):
            text = header.removeprefix(self.marks(START)).removeprefix("assistant")
            is_header = self.marks.is_token(CHANNEL) and self.marks(CHANNEL) in text
            if not is_header or len(text) > _MOST_OF_HEADER:
                self.sink.content(text)  # else it was cut off, and none of it was an answer's
            return found
        _, _, after = header.rpartition(self.marks(CHANNEL))
        channel = _CHANNEL.match(after)
        recipient = _RECIPIENT.search(header)
        if recipient:
            name = recipient[1].removeprefix("functions.")
            if name in self.tools or (self.tools and recipient[1] != name):
                yield from self.attempt(self._call(name), header + found)
                return (yield from self._rest())
        if recipient or (channel and channel[1] == "analysis"):
            return (yield from self._reasoning())
        return (yield from self._rest())

    def _call(self, name: str) -> Steps[None]:
        yield from self.source.spaces()
        if MARK.match((yield from self.source.peek())):
            self.emit_call(self.named(name), "{}")
            return
        yield from self.json_arguments(self.named(name))
        yield from self.source.spaces()

    def _reasoning(self) -> Steps[str | None]:
        first = True

        def emit(text: str) -> None:
            nonlocal first
            if first and self._reasoned:
                self.sink.reasoning("\n")
            first, self._reasoned = False, True
            self.sink.reasoning(text)

        return (yield from self.source.until(self._ends, emit))

    def _rest(self) -> Steps[str | None]:
        """Content up to the end of the message."""
        first = True

        def emit(text: str) -> None:
            nonlocal first
            if first and self._said and self.sink.has_content:
                self.sink.content("\n")
            first, self._said = False, True
            self.sink.content(text)

        return (yield from self.source.until(self._ends, emit))
