"""Answers in each format of calls, with what they say: as if by hand, from the families' templates.

Marks are written as text; a test turns those that its vocabulary has as tokens into tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field

STRING, OBJECT = {"type": "string"}, {"type": "object"}
TOOLS = {
    "get_weather": {
        "type": "object",
        "properties": {
            "city": STRING,
            "days": {"type": "integer"},
            "exact": {"type": "boolean"},
            "note": {"type": ["string", "null"]},
        },
        "required": ["city"],
    },
    "write": {
        "type": "object",
        "properties": {"path": STRING, "text": STRING, "meta": OBJECT, "tags": {"type": "array"}},
    },
    "now": {"type": "object", "properties": {}},
}


@dataclass
class Case:
    parser: str
    text: str
    calls: list[tuple[str, object]] = field(default_factory=list)
    content: str = ""
    reasoning: str = ""
    reasoning_parser: str | None = None
    inside: bool | None = None
    num_broken: int = 0  # calls that began and came to nothing


W = "get_weather"
HARD = r'{"path": "a\"}{[.txt", "text": "x{\"a\": [1, {\"b\": \"\u00e9\"}]}\n</tool_call> é😀 \\", '
HARD += r'"meta": {"k": [1.5e3, -0, true, null, {"": {}}]}, "tags": []}'
HARD_VALUE = {
    "path": 'a"}{[.txt',
    "text": 'x{"a": [1, {"b": "é"}]}\n</tool_call> é😀 \\',
    "meta": {"k": [1500.0, 0, True, None, {"": {}}]},
    "tags": [],
}
