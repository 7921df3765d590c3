"""How the cases ask: the same question whole and streamed, and what a stream amounts to."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tests.fixtures.server import Server

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


@dataclass
class Heard:
    """One choice, put together from a stream's events or taken from a whole answer."""

    chunks: list[str] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    @property
    def text(self) -> str:
        return "".join(self.chunks)

    @property
    def outcome(self) -> tuple[str, str | None, int | str | None]:
        return self.text, self.finish_reason, self.stop_reason


def question(route: str, prompt: str, **fields: Any) -> dict[str, Any]:
    """A greedy body for the route; on the chat route ``prompt`` is the user's message."""
    fields = {"temperature": 0, **fields}
    if route == CHAT:
        return {"messages": [{"role": "user", "content": prompt}], **fields}
    return {"prompt": prompt, **fields}


def post(server: Server, route: str, **body: Any) -> dict[str, Any]:
    answer = server.client.post(route, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def whole(server: Server, route: str, **body: Any) -> tuple[list[Heard], dict[str, Any]]:
    """The choices in order, and the usage."""
    answer = post(server, route, **body)
    choices = [
        Heard([_text(choice, "message")], choice["finish_reason"], choice["stop_reason"])
        for choice in answer["choices"]
    ]
    assert [choice["index"] for choice in answer["choices"]] == [*range(len(choices))]
    return choices, answer["usage"]


def streamed(server: Server, route: str, **body: Any) -> tuple[list[Heard], dict[str, Any]]:
    """As ``whole``; nothing may follow the end of a choice, and the usage comes last and alone."""
    events = server.events(route, **body, stream_options={"include_usage": True})
    choices: dict[int, Heard] = {}
    for event in events[:-1]:
        assert event["choices"], "an event without choices before the last"
        for choice in event["choices"]:
            heard = choices.setdefault(choice["index"], Heard())
            assert heard.finish_reason is None, "an event after the choice's end"
            heard.chunks.append(_text(choice, "delta"))
            heard.finish_reason = choice["finish_reason"]
            heard.stop_reason = choice.get("stop_reason")
    assert events[-1]["choices"] == []
    return [choices[index] for index in sorted(choices)], events[-1]["usage"]


def _text(choice: dict[str, Any], part: str) -> str:
    return choice["text"] if "text" in choice else choice[part].get("content") or ""


def same_both_ways(server: Server, route: str, **body: Any) -> tuple[list[Heard], dict[str, Any]]:
    """The stream's choices and usage, which equal those of the whole answer. Cached tokens may
    differ: the second question finds what the first left."""
    choices, usage = streamed(server, route, **body)
    expected, expected_usage = whole(server, route, **body)
    assert [c.outcome for c in choices] == [c.outcome for c in expected]
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert usage[name] == expected_usage[name]
    return choices, usage
