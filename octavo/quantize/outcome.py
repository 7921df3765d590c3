"""What quantizing a checkpoint came to."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Outcome:
    """Bytes of the files with weights, ``before`` and ``after``; ``notes``: what was decided, to be
    said."""

    before: int
    after: int
    notes: list[str] = field(default_factory=list)
