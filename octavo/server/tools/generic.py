"""``{"name": "f", "arguments": {…}}``, or a list of such, at the beginning of a line or in a fenced
block: for models that were taught no format. Under ``tool_choice`` required or a name a grammar
made from the tools' schemas has any model write this."""

from __future__ import annotations

import re

from octavo.server.tools.format import Bare
from octavo.server.tools.source import Steps

_LANGUAGE = re.compile("[A-Za-z_]+")


class Json(Bare):
    name = "json"
    OPENERS = "{[`"

    def calls(self) -> Steps[None]:
        fenced = yield from self.source.literal("```")
        if fenced:
            yield from self.source.word(_LANGUAGE, 32)
            yield from self.source.spaces()
        yield from self.json_calls(strict=True)
        if fenced:
            yield from self.source.spaces()
            yield from self.source.literal("```")
