"""Fixtures for all tests: the models of tests/fixtures/models.py and servers that run them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import settings

from octavo import machine
from octavo.config import prepare_torch
from tests.fixtures import models, server, triton_interpreter
from tests.fixtures.scripted import ScriptedModel, scripted_model

prepare_torch()  # tests import torch before an engine could
if int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")) > 1:
    # Several workers share the cores: each computes in one thread, and so does what it starts.
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    machine.available_cores = lambda: 1
if not torch.cuda.is_available():
    triton_interpreter.enable()

# CI runs the same examples every time; a developer who changed the scheduler explores new ones.
settings.register_profile("default", deadline=None, derandomize=True, print_blob=True)
settings.register_profile("explore", deadline=None, max_examples=3000, print_blob=True)
settings.load_profile("default")


@pytest.fixture
def one_thread() -> Iterator[None]:
    """For many small kernels: on a busy machine a team waits milliseconds at each barrier."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def model_r() -> Path:
    """R: random Llama, FP32 safetensors directory."""
    return models.path("R")


@pytest.fixture(scope="session")
def model_g() -> Path:
    """G: the demo model's GGUF file."""
    return models.path("G")


@pytest.fixture(scope="session")
def model_s() -> ScriptedModel:
    """S with two scripts: a word split over tokens, and characters split over tokens."""
    return scripted_model(
        "basic",
        [
            ["DEF", "G", "HI", "J", " and", " more", " text", "."],
            [b"\xf0", b"\x9f", b"\x98", b"\x80", b" \xe2\x82", b"\xac\xc3", b"\xa9", "!"],
        ],
    )


@pytest.fixture(scope="session")
def server_r(model_r: Path) -> Iterator[server.Server]:
    """A server of R that tests of one session share; it must be idle after each of them."""
    with server.start(model_r, "--dtype", "float32", "--kv-cache-memory-bytes", "16MiB") as running:
        yield running


@pytest.fixture(scope="session")
def server_s(model_s: ScriptedModel) -> Iterator[server.Server]:
    """A server of S, shared as ``server_r`` is."""
    flags = ("--dtype", "float32", "--kv-cache-memory-bytes", "16MiB")
    with server.start(model_s.path, *flags) as running:
        yield running
