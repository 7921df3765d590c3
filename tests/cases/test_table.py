"""docs/cases.md names tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_test_of_the_table_exists():
    rows = (ROOT / "docs/cases.md").read_text()
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", rows)
    assert len(named) > 40
    for file, test in named:
        assert f"def {test}(" in (ROOT / file).read_text(), f"{file}::{test}"
