"""Writes that wait for the end of the loop's turn."""

from __future__ import annotations

import asyncio

import pytest

from octavo.server.writes import MOST_WAITING, BatchedTransport, WriteBatch


class Transport:
    """Notes what is done to it, in a list that several may share."""

    def __init__(self, name: str, done: list[tuple[str, bytes | str]]) -> None:
        self.name, self.done, self.closing = name, done, False

    def write(self, data: bytes) -> None:
        assert not self.closing, "uvloop refuses to write to a closed transport"
        self.done.append((self.name, data))

    def close(self) -> None:
        self.closing = True
        self.done.append((self.name, "closed"))

    def is_closing(self) -> bool:
        return self.closing


@pytest.fixture
def done() -> list[tuple[str, bytes | str]]:
    return []


def connections(done: list[tuple[str, bytes | str]], *names: str) -> list[BatchedTransport]:
    batch = WriteBatch()
    return [BatchedTransport(Transport(name, done), batch) for name in names]


def test_streams_that_are_ready_at_once_are_written_in_a_row_after_all_have_run(done):
    async def run() -> None:
        a, b = connections(done, "a", "b")

        async def stream(transport: BatchedTransport, name: str) -> None:
            transport.write(b"1" + name.encode())
            done.append((name, "ran"))
            transport.write(b"2" + name.encode())

        await asyncio.gather(stream(a, "a"), stream(b, "b"))
        await asyncio.sleep(0)

    asyncio.run(run())
    assert done == [("a", "ran"), ("b", "ran"), ("a", b"1a2a"), ("b", b"1b2b")]


def test_closing_sends_first_what_waits(done):
    async def run() -> None:
        (a,) = connections(done, "a")
        a.write(b"end")
        a.close()
        await asyncio.sleep(0)

    asyncio.run(run())
    assert done == [("a", b"end"), ("a", "closed")]


def test_what_waits_for_a_connection_that_is_lost_is_dropped_and_the_others_are_sent(done):
    async def run() -> None:
        a, b = connections(done, "a", "b")
        a.write(b"a")
        b.write(b"b")
        a._transport.closing = True
        await asyncio.sleep(0)
        b.write(b"later")
        await asyncio.sleep(0)

    asyncio.run(run())
    assert done == [("b", b"b"), ("b", b"later")]


def test_a_full_batch_does_not_wait_for_the_end_of_the_turn(done):
    async def run() -> None:
        all_of_them = connections(done, *map(str, range(MOST_WAITING + 1)))
        for transport in all_of_them:
            transport.write(b"x")
        assert len(done) == MOST_WAITING
        await asyncio.sleep(0)

    asyncio.run(run())
    assert done == [(str(i), b"x") for i in range(MOST_WAITING + 1)]
