"""Servers that the cases share. After every test each server that it used must be alive: idle, with
the same answer to the same question, and healthy."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.cases import scripts
from tests.fixtures import server
from tests.fixtures.scripted import ScriptedModel
from tests.fixtures.server import Server

GOLDEN = [0, 40, 41, 42, 43]
KEYS = ("first-key", "second-key")
_answers: dict[str, Any] = {}


def golden(running: Server) -> Any:
    return running.complete(GOLDEN, max_tokens=8, ignore_eos=True)["choices"]


def alive(running: Server) -> Iterator[Server]:
    """Yields the server, then asserts that it is alive."""
    expected = _answers.setdefault(running.url, golden(running))
    yield running
    running.wait_idle()
    assert golden(running) == expected
    assert running.client.get("/health").status_code == 200


@pytest.fixture(autouse=True)
def _small_kernels(one_thread: None) -> None:
    """Of the oracle."""


@pytest.fixture
def random_model(server_r: Server) -> Iterator[Server]:
    """R, with room for all."""
    yield from alive(server_r)


@pytest.fixture(scope="session")
def scripted() -> ScriptedModel:
    return scripts.model()


@pytest.fixture(scope="session")
def scripted_server(scripted: ScriptedModel) -> Iterator[Server]:
    flags = ("--dtype", "float32", "--kv-cache-memory-bytes", "16MiB")
    with server.start(scripted.path, *flags) as running:
        yield running


@pytest.fixture
def says(scripted_server: Server) -> Iterator[Server]:
    """A model that says the texts of ``scripts``."""
    yield from alive(scripted_server)


@pytest.fixture(scope="session")
def tight_server(model_r) -> Iterator[Server]:
    """R with two keys and a pool that overflows: 12 blocks, four at once, prompts in pieces."""
    flags = ("--dtype", "float32", "--num-gpu-blocks-override", "12", "--max-num-seqs", "4")
    flags += ("--long-prefill-token-threshold", "24", "--max-num-queued-reqs", "100")
    flags += tuple(word for key in KEYS for word in ("--api-key", key))
    with server.start(model_r, *flags, api_key=KEYS[0]) as running:
        yield running


@pytest.fixture
def tight(tight_server: Server) -> Iterator[Server]:
    yield from alive(tight_server)
