"""Which grammars an engine has compiled, and when."""

from __future__ import annotations

import pytest

from octavo.grammar import grammars as module
from octavo.grammar.grammars import Grammars
from octavo.types import StructuredOutputsParams
from tests.grammar import walks


@pytest.fixture
def found():
    grammars = Grammars()
    grammars.set_vocabulary(walks.VOCABULARY)
    yield grammars
    grammars.close()


def text(index: int) -> str:
    return walks.text_of(StructuredOutputsParams(regex=f"[a-z]+{index:02}"))


def wait(grammars: Grammars, *texts: str) -> None:
    while not all(map(grammars.ready, texts)):
        grammars.prepared.wait(0.05)
        grammars.prepared.clear()


def test_requests_share_what_is_compiled_and_the_last_ones_stay(found, monkeypatch):
    monkeypatch.setattr(module, "MOST_KEPT", 3)
    for index in (0, 0, 1):
        found.prepare(text(index))
    wait(found, text(0), text(1))
    compiled = found._entries[text(0)].compiled
    found.release(text(0))
    found.prepare(text(0))
    assert found._entries[text(0)].compiled is compiled and found.ready(text(0))
    for index in (0, 0, 1):
        found.release(text(index))
    assert found.num_used == 0 and found._used_bytes == 0
    for index in range(2, 7):
        found.prepare(text(index))
        wait(found, text(index))
        found.release(text(index))
    assert list(found._entries) == [text(index) for index in (4, 5, 6)]


def test_beyond_the_bound_grammars_wait_until_others_have_ended(found, monkeypatch):
    size = len(text(0))
    monkeypatch.setattr(module, "MOST_USED_BYTES", 2 * size)
    for index in range(5):
        found.prepare(text(index))
    wait(found, text(0), text(1))
    assert [found.ready(text(index)) for index in range(5)] == [True, True, False, False, False]
    found.release(text(3))  # left while it waited
    found.release(text(0))
    wait(found, text(2))
    assert not found.ready(text(4))
    found.release(text(1))
    wait(found, text(4))
    found.prepare(text(0))  # still compiled, but there is no room
    assert not found.ready(text(0))
    for index in (2, 4):
        found.release(text(index))
    assert found.ready(text(0))
    found.release(text(0))
    assert found._used_bytes == 0 and not found._delayed


def test_one_that_is_larger_than_the_bound_is_compiled_alone(found, monkeypatch):
    monkeypatch.setattr(module, "MOST_USED_BYTES", 10)
    found.prepare(text(0))
    found.prepare(text(1))
    wait(found, text(0))
    assert not found.ready(text(1))
    found.release(text(0))
    wait(found, text(1))


def test_what_is_kept_is_bounded_in_bytes(found, monkeypatch):
    monkeypatch.setattr(module, "MOST_KEPT_BYTES", 2 * len(text(0)))
    for index in range(4):
        found.prepare(text(index))
        wait(found, text(index))
        found.release(text(index))
    assert list(found._entries) == [text(2), text(3)]
