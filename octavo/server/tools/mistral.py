"""Mistral's: ``[TOOL_CALLS][{"name": "f", "arguments": {…}}, …]`` up to tokenizer 7, then
``[TOOL_CALLS]f[ARGS]{…}`` for each call, in version 13 with ``[CALL_ID]`` and an id between."""

from __future__ import annotations

import re
import secrets
import string

from octavo.server.tools.format import Format
from octavo.server.tools.source import Steps

_ALPHABET = string.ascii_letters + string.digits
_NAME = re.compile(r"[^\s\[\]{}\"\ud800-\udfff]+")
_ID = re.compile("[A-Za-z0-9]+")


class Mistral(Format):
    name = "mistral"
    MARKS = ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")
    BEGINS = ("[TOOL_CALLS]",)

    @staticmethod
    def new_id(name: str) -> str:
        """Nine letters and digits: templates of Mistral refuse other ids."""
        return "".join(secrets.choice(_ALPHABET) for _ in range(9))

    def run(self) -> Steps[None]:
        while begin := (yield from self.content_until(*self.BEGINS)):
            yield from self.attempt(self._calls(), begin)

    def _calls(self) -> Steps[None]:
        yield from self.source.spaces()
        if (yield from self.source.peek()) in ("[", "{"):
            yield from self.json_calls()
            return
        name = self.named((yield from self.source.word(_NAME, 256)))
        call_id = ""
        if (yield from self.optional("[CALL_ID]")):
            call_id = yield from self.source.word(_ID, 64)
        yield from self.optional("[ARGS]")
        yield from self.source.spaces()
        yield from self.json_arguments(name, call_id or None)
