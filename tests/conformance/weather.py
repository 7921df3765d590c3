"""A tool and a structured answer, as every client is asked for them.

The scripted model (``prepare``) calls the tool when it sees it, and answers its result. It tells
nothing else apart, so a call that does not come back the right way is noticed.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

QUESTION = "Will I need an umbrella in Zürich?"
ARGUMENTS = {"city": "Zürich", "days": 2}
RESULT = "rain, 11 degrees"
ANSWER = "It will rain in Zürich ☔, 11 degrees."


class Weather(BaseModel):
    """A place, and how many days are asked for."""

    city: str
    days: int


def get_weather(city: str, days: int) -> str:
    """The weather of a city for some days."""
    assert {"city": city, "days": days} == ARGUMENTS
    return RESULT


TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city for some days.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["city", "days"],
        },
    },
}
