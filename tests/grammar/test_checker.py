"""Grammars are checked in a process that may fall: who asked is told, and the next is served."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from octavo.server import grammars
from octavo.server.grammars import GrammarChecker
from octavo.types import InvalidRequest, QueueFull, StructuredOutputsParams
from tests.fixtures.waiting import PATIENCE
from tests.grammar.walks import SPECIAL, VOCABULARY

GOOD = StructuredOutputsParams(regex="[a-z]+")
# Each is small, and too much for the compiler in another way.
DEEP = "start: a0\n" + "".join(f"a{i}: a{i + 1}\n" for i in range(9000)) + 'a9000: "x"'
SLOW = {"type": "object", "patternProperties": {f"^a{i}x": {"type": "string"} for i in range(400)}}
FUEL = "start: A\nA: " + " & ".join(f"/.*a.{{{i}}}b.*/" for i in range(1, 21))


@pytest.fixture(autouse=True)
def no_hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the checker's own limit, of the processor's time, ends it."""
    monkeypatch.setattr(grammars, "WALL_SECONDS", PATIENCE)


def run(work: Callable[[GrammarChecker], Awaitable[None]]) -> None:
    async def main() -> None:
        checker = GrammarChecker(lambda: VOCABULARY, lambda: SPECIAL)
        try:
            await work(checker)
        finally:
            await checker.close()

    asyncio.run(main())


async def refusal(checker: GrammarChecker, params: StructuredOutputsParams) -> str:
    with pytest.raises(InvalidRequest) as caught:
        await checker.text(params)
    assert caught.value.param == f"structured_outputs.{params.kind}"
    return str(caught.value)


@pytest.mark.parametrize(
    "hungry",
    [
        StructuredOutputsParams(grammar=DEEP),
        StructuredOutputsParams(json=SLOW),
        StructuredOutputsParams(grammar=FUEL),
    ],
    ids=["deep", "slow", "fuel"],
)
def test_what_is_too_much_is_refused_and_others_are_served(
    hungry: StructuredOutputsParams, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work(checker: GrammarChecker) -> None:
        await checker.text(GOOD)
        first = checker._process
        refused, others = await asyncio.gather(
            refusal(checker, hungry),
            asyncio.gather(*(checker.text(StructuredOutputsParams(regex=f"a{i}")) for i in
                             range(5))),
        )  # fmt: skip
        assert refused
        assert len(others) == 5
        monkeypatch.setattr(checker, "_ask", None)
        assert await refusal(checker, hungry) == refused  # remembered: nothing is compiled
        assert first is not None

    run(work)


def test_the_checker_answers_in_turn_and_remembers() -> None:
    async def work(checker: GrammarChecker) -> None:
        texts = [StructuredOutputsParams(regex=r) for r in ("a", "([a", "b", "c{3,1}", "a")]
        found = await asyncio.gather(*map(checker.text, texts), return_exceptions=True)
        assert [isinstance(item, InvalidRequest) for item in found] == [0, 1, 0, 1, 0]
        assert found[0] == found[4]
        process = checker._process
        assert process is not None
        await checker.text(texts[0])
        assert checker._process is process

    run(work)


def test_a_crowd_is_told_to_come_again() -> None:
    async def work(checker: GrammarChecker) -> None:
        crowd = (checker.text(StructuredOutputsParams(regex=f"a{i}")) for i in range(90))
        found = await asyncio.gather(*crowd, return_exceptions=True)
        assert sum(isinstance(item, QueueFull) for item in found) == 26
        assert sum(isinstance(item, str) for item in found) == 64

    run(work)


def test_one_who_leaves_does_not_leave_an_answer_for_another() -> None:
    async def work(checker: GrammarChecker) -> None:
        await checker.text(GOOD)
        slow = asyncio.ensure_future(checker.text(StructuredOutputsParams(json=SLOW)))
        await asyncio.sleep(0.1)
        slow.cancel()
        await checker.text(StructuredOutputsParams(regex="next"))
        assert "unclosed" in await refusal(checker, StructuredOutputsParams(regex="([a"))

    run(work)


def test_requests_that_are_given_up_do_not_cost_others_the_checker() -> None:
    async def work(checker: GrammarChecker) -> None:
        await checker.text(GOOD)
        process = checker._process
        for index in range(20):
            given_up = asyncio.ensure_future(
                checker.text(StructuredOutputsParams(regex=f"(a|b){{{index}}}c+"))
            )
            await asyncio.sleep(0.002)
            given_up.cancel()
        assert await checker.text(StructuredOutputsParams(regex="next"))
        assert checker._process is process

    run(work)


def test_the_checker_ends_with_its_server() -> None:
    async def main() -> int:
        checker = GrammarChecker(lambda: VOCABULARY, lambda: SPECIAL)
        await checker.text(GOOD)
        assert checker._process is not None and checker._process.stdin is not None
        pid = checker._process.pid
        checker._process.stdin.close()  # as when the server's process is gone
        await asyncio.wait_for(checker._process.wait(), PATIENCE)
        return pid

    pid = asyncio.run(main())
    assert not Path(f"/proc/{pid}").exists()
