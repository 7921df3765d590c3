from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.server import mock_server
from tests.server.mock_server import MockServer


@pytest.fixture(scope="module")
def shared_server() -> Iterator[MockServer]:
    with mock_server.start() as running:
        yield running


@pytest.fixture
def server(shared_server: MockServer) -> Iterator[MockServer]:
    """A server shared by a module's tests; each must leave it alive and idle."""
    yield shared_server
    shared_server.wait_idle()
    golden = shared_server.complete("say:golden")
    assert golden["choices"][0]["text"] == "golden"
    assert shared_server.client.get("/health").status_code == 200
