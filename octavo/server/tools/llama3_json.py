"""``{"name": "f", "parameters": {…}}``, several with ``;`` between: Llama 3.1 and 3.2, with or
without ``<|python_tag|>`` before. Without the mark a call must begin a line."""

from __future__ import annotations

from octavo.server.tools.format import Bare
from octavo.server.tools.source import Steps


class Llama3Json(Bare):
    name = "llama3_json"
    MARKS = ("<|python_tag|>",)
    BEGINS = ("<|python_tag|>",)
    EXAMPLE = '{"name": NAME, "parameters": {…}}'

    def calls(self) -> Steps[None]:
        while True:
            yield from self.json_calls(strict=True)
            yield from self.source.spaces(self.sink.content)
            if (yield from self.source.peek()) not in (";", ","):
                return
            self.source.take(1)
            yield from self.source.spaces()
