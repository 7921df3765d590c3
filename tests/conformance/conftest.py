"""Servers for other people's clients.

`make conformance` runs these tests in an environment of their own, which holds the clients and not
octavo: the server is started by the Python that OCTAVO_TEST_PYTHON names.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest

from tests.fixtures import server
from tests.fixtures.server import PYTHON, ROOT, Server

TOOL_FLAGS = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes")


def in_servers_environment(module: str, *arguments: str) -> Any:
    """The JSON that ``python -m module`` prints, run by the server's Python."""
    command = [PYTHON, "-m", module, *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="session")
def places() -> dict[str, str]:
    """Model -> its path."""
    return in_servers_environment("tests.conformance.prepare")


@pytest.fixture(scope="session")
def demo(places: dict[str, str]) -> Iterator[Server]:
    """The demo model, as its users have it."""
    flags = ("--served-model-name", "demo", "--kv-cache-memory-bytes", "256MiB")
    with server.start(places["G"], *flags) as running:
        yield running


@pytest.fixture(scope="session")
def twin(places: dict[str, str]) -> Iterator[Server]:
    """The same weights in safetensors, computed in float32 as transformers will."""
    flags = ("--served-model-name", "twin", "--kv-cache-memory-bytes", "256MiB")
    with server.start(places["G-bf16"], *flags, "--dtype", "float32") as running:
        yield running


@pytest.fixture(scope="session")
def scripted(places: dict[str, str]) -> Iterator[Server]:
    """A model that calls a tool and reads its result."""
    flags = ("--served-model-name", "scripted", "--kv-cache-memory-bytes", "16MiB")
    with server.start(places["S"], *flags, "--dtype", "float32", *TOOL_FLAGS) as running:
        yield running
