"""``<|tool_call|>[{"name": "f", "arguments": {…}}, …]``: Granite 3. Version 3.0 spelled the mark
``<tool_call>``, version 4 closes it as Hermes does."""

from __future__ import annotations

from octavo.server.tools.format import Tagged


class Granite(Tagged):
    name = "granite"
    MARKS = ("<|tool_call|>", "<tool_call>", "</tool_call>")
    BEGINS = ("<|tool_call|>", "<tool_call>")
    END = "</tool_call>"
    EXAMPLE = '<tool_call>[{"name": NAME, "arguments": {…}}]</tool_call>'
