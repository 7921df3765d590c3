"""A choice ends once, however late its consumer reads."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

from octavo.engine.streams import RequestStream
from octavo.server.generation import Ask, Choice, Generation, Prompt
from octavo.types import SamplingParams


class StopsAtB:
    """The text of a choice; tokens are bytes."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.stop_string: str | None = None

    def push(self, ids: list[int]) -> str:
        self.token_ids += ids
        text = bytes(ids).decode()
        if "b" in text:
            self.stop_string = "b"
        return text.partition("b")[0]


def test_a_token_that_was_under_way_when_a_stop_string_was_met_changes_nothing():
    """The first events hold the stop already, and before they are read the next token is there."""
    stopped: list[int] = []
    finished: list[int] = []

    async def main() -> list[list[str]]:
        ignored = SimpleNamespace(observe=lambda *values: None)
        measures = SimpleNamespace(
            first_token=ignored,
            inter_token=ignored,
            num_generated_tokens=0,
            on_finished=lambda timings, num_prompt, num_output, most: finished.append(num_output),
        )
        client = SimpleNamespace(abort=lambda handles, reason: stopped.extend(handles))
        generation = Generation.__new__(Generation)
        generation._state = SimpleNamespace(client=client)
        generation._submission = SimpleNamespace(measures=lambda handle: measures)
        generation._ask = Ask("r", [[1]], [None], SamplingParams(stop=["b"]), 0.0)
        generation._stream = stream = RequestStream(asyncio.get_running_loop(), [0])
        generation._first_handle = 0
        generation.choices = [Choice(0, 0, Prompt([1], None, 0), StopsAtB(), 0.0)]
        stream.events().tokens += [(0, ord("a")), (0, ord("b"))]
        generation._first = await anext(stream)
        stream.events().tokens.append((0, ord("c")))
        stream.open.clear()
        return [[piece.text for piece in batch] async for batch in generation.pieces()]

    assert asyncio.run(main()) == [["a"]]
    assert stopped == [0] and finished == [2]
