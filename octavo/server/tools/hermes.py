"""``<tool_call>{"name": "f", "arguments": {…}}</tool_call>``: Hermes 2 Pro, Qwen 2.5 and 3, Granite
4 and many that learned from them. Some write ``parameters``."""

from __future__ import annotations

from octavo.server.tools.format import Tagged


class Hermes(Tagged):
    name = "hermes"
    MARKS = ("<tool_call>", "</tool_call>")
    BEGINS = ("<tool_call>",)
    END = "</tool_call>"
    EXAMPLE = '<tool_call>{"name": NAME, "arguments": {…}}</tool_call>'
