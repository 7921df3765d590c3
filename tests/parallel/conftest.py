"""Fixtures of the tests that divide models."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.model.running import write_checkpoint


@pytest.fixture(scope="package")
def written(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A tiny model of transformers' class, once for all tests."""
    found: dict[str, Path] = {}

    def make(name: str, **changes: Any) -> Path:
        key = repr((name, sorted(changes.items())))
        if key not in found:
            path = tmp_path_factory.mktemp("model")
            write_checkpoint(path, name, **changes)
            found[key] = path
        return found[key]

    return make
