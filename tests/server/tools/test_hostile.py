"""Whatever a request says of tools: an answer or a 400 that names a field, and no harm done."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest

from tests.server import mock_server
from tests.server.tools.test_chat import CHAT, ROOM, TOOLS, body

SCRAPS: list[Any] = [
    *(None, True, 0, -1, 1.5, 10**30, "", "x", "function", "required", "auto", "none", "é😀\x00"),
    *([], {}, [[]], [{}], {"type": "function"}, {"type": "object"}, {"$ref": "#"}, "get", "now"),
    *({"$ref": "#/properties/a"}, {"anyOf": [{}]}, {"type": ["string", 3]}, {"enum": []}),
    *({"type": "string", "pattern": "("}, {"const": None}, "a" * 5000, {"properties": {"": {}}}),
]
PATHS = [
    ("tools",), ("tools", 0), ("tools", 0, "type"), ("tools", 0, "function"),
    ("tools", 0, "function", "name"), ("tools", 0, "function", "description"),
    ("tools", 0, "function", "parameters"), ("tools", 0, "function", "strict"),
    ("tools", 0, "function", "parameters", "properties"),
    ("tools", 0, "function", "parameters", "properties", "city"),
    ("tools", 0, "function", "parameters", "required"),
    ("tools", 0, "function", "parameters", "$defs"),
    ("tools", 0, "function", "parameters", "additionalProperties"),
    ("tool_choice",), ("parallel_tool_calls",), ("include_reasoning",), ("response_format",),
    ("messages", 0, "tool_calls"), ("messages", 0, "tool_call_id"), ("messages", 0, "role"),
    ("messages", 0, "reasoning"), ("max_tokens",), ("n",), ("stop",), ("stream",),
]  # fmt: skip


def mutated(rng: random.Random) -> dict[str, Any]:
    """A good body with some of its parts replaced."""
    ask = copy.deepcopy(body("<think>a</think>b <tool_call>{}", tools=TOOLS, max_tokens=20))
    ask["tool_choice"] = rng.choice(["auto", "required", "none"])
    if rng.random() < 0.3:
        ask["tools"][0]["function"]["strict"] = True
    for _ in range(rng.choice((1, 1, 2))):
        *path, last = rng.choice(PATHS)
        place: Any = ask
        for key in path:
            if isinstance(place, dict):
                place = place.setdefault(key, {})
            elif isinstance(place, list) and isinstance(key, int) and key < len(place):
                place = place[key]
        if isinstance(place, dict) or (isinstance(place, list) and place and isinstance(last, int)):
            place[last] = copy.deepcopy(rng.choice(SCRAPS))
    return ask


@pytest.mark.parametrize("parser", ["hermes", "pythonic", "qwen3_coder"])
def test_mutated_requests(parser):
    flags = {
        "enable_auto_tool_choice": True, "tool_call_parser": parser, "reasoning_parser": "qwen3",
    }  # fmt: skip
    rng = random.Random(parser)
    statuses: dict[int, int] = {}
    with mock_server.start(engine=ROOM, server=flags) as server:
        for _ in range(150):
            ask = mutated(rng)
            answer = server.post(CHAT, **ask)
            statuses[answer.status_code] = statuses.get(answer.status_code, 0) + 1
            assert answer.status_code in (200, 400), (ask, answer.text)
            if answer.status_code == 400:
                assert answer.json()["error"]["param"], (ask, answer.text)
        server.wait_idle()
        assert server.client.get("/health").status_code == 200
        assert "Traceback" not in server.log
    assert statuses[200] >= 8 and statuses[400] >= 20, statuses
