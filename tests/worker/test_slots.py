"""Slots: what they take before anything is written."""

from __future__ import annotations

import subprocess
import sys

# In a process of its own: one that has freed much memory may get some of it again, which the
# allocator then clears.
PROGRAM = """
from pathlib import Path
from octavo.worker.slots import Slots

def resident():
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmRSS")).split()[1])

before = resident()
slots = Slots(64, 4_000_000, 16, vocab_size=1_000_000)
assert slots.history.shape == (64, 4_000_001)
grown = resident() - before
assert grown < 20_000, f"{grown} KiB, the tables are 1.4 GB"
slots.history_host[3, 5] = 7
assert slots.history[3, 5] == 7
"""


def test_tables_of_long_contexts_take_no_memory_until_they_are_written() -> None:
    subprocess.run([sys.executable, "-c", PROGRAM], check=True)
