"""Slots: what they take before anything is written."""

from __future__ import annotations

from pathlib import Path

from octavo.worker.slots import Slots


def resident() -> int:
    """KiB of this process that are in memory."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmRSS")).split()[1])


def test_tables_of_long_contexts_take_no_memory_until_they_are_written() -> None:
    before = resident()
    slots = Slots(64, 4_000_000, 16, vocab_size=1_000_000)
    assert slots.history.shape == (64, 4_000_001)
    assert resident() - before < 20_000  # the tables are 1.4 GB
    slots.history_host[3, 5] = 7
    assert slots.history[3, 5] == 7
