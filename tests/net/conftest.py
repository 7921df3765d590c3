from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.net import hosts


@pytest.fixture
def link(tmp_path: Path) -> Iterator[hosts.Link]:
    """Two hosts joined by a cable that can be cut."""
    if why := hosts.unavailable():
        pytest.skip(why)
    with hosts.two_hosts(tmp_path) as link:
        yield link
