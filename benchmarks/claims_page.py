"""docs/guide-claims.md from what was measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.report import ROOT

PAGE = ROOT / "docs" / "guide-claims.md"

INTRODUCTION = """# The guide's claims, measured

`make bench-guide` writes this page: each claim of the guide beside what this machine says. "Not
true here, because" is a valid answer. Ratios count; absolute times are those of one small machine.

How:

- **Memory** is counted at equal pools of 8,192 token places and a longest context of 2,048, for
  128 requests of 32–512 tokens in and 16–256 out that all wait at the start; means are over the
  steps in which requests waited. Contiguous allocation is simulated from the lengths
  (`benchmarks/contiguous.py`): *max* reserves the whole context for each request, *power2* the
  next power of two above what it will use, *exact* just that, as if it were known beforehand.
  Paging is the live engine's own count of blocks and of token places in them.
- **Time** is the demo model's BF16 twin. Static batches of 8 are run by the same engine: a batch
  starts when the one before has ended. transformers runs `generate` on the same batches, in turns
  with octavo (`benchmarks/cpu.py` has the longer comparison).
- **Pause**: four requests decode when a prompt of 2,048 tokens arrives.
"""


def write_page(claims: list[dict[str, Any]], environment: dict[str, Any]) -> Path:
    rows = [
        f"| {claim['topic']} | {claim['guide']} | {claim['measured']} | {claim['verdict']} |"
        for claim in claims
    ]
    versions = ", ".join(f"{name} {value}" for name, value in environment["versions"].items())
    machine = f"{environment['cpu']}, {environment['cores']} cores, {environment['date'][:10]}"
    PAGE.write_text(
        f"{INTRODUCTION}\n"
        "| claim | the guide | measured here | verdict |\n|---|---|---|---|\n"
        + "\n".join(rows)
        + f"\n\nMeasured on {machine}, commit {environment['commit']}, {versions}.\n"
    )
    return PAGE
