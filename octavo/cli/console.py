"""What commands show while they work: one line that moves on a terminal, plain lines in a log."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import TextIO

_BAR = 24
LOG_SECONDS = 10.0  # between two lines of one phase in a log


class PhaseLine:
    """A ``types.Progress``. ``end()`` closes the last phase.

    On a terminal the line is redrawn in place; elsewhere each phase is one line when it begins, and
    one every ten seconds while it lasts. ``seconds`` holds how long each phase took, in order.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self.stream = stream or sys.stderr
        self.seconds: dict[str, float] = {}
        self._is_terminal = self.stream.isatty()
        self._phase = ""
        self._began = 0.0
        self._drawn = 0.0
        self._num_bytes = 0

    def __call__(self, phase: str, fraction: float, num_bytes: int = 0) -> None:
        now = time.monotonic()
        if phase != self._phase:
            self.end()
            self._phase, self._began, self._num_bytes = phase, now, num_bytes
            if not self._is_terminal:
                self._drawn = now
                print(f"  {phase} …", file=self.stream, flush=True)
        elif now - self._drawn < (0.1 if self._is_terminal else LOG_SECONDS):
            return
        self._num_bytes = max(self._num_bytes, num_bytes)
        if self._is_terminal:
            self._drawn = now
            shown = f"{bar(fraction)} {self._state(fraction, now)}" if fraction >= 0 else "…"
            print(f"\r\x1b[K  {phase} {shown}", end="", file=self.stream, flush=True)
        elif now - self._drawn >= LOG_SECONDS:
            self._drawn = now
            print(f"  {phase} {self._state(fraction, now)}", file=self.stream, flush=True)

    def _state(self, fraction: float, now: float) -> str:
        """``43%, 0.9 of 2.1 GiB, 3 s``, of what is known."""
        parts = [f"{fraction:.0%}"] if fraction >= 0 else []
        if self._num_bytes and fraction >= 0:
            parts.append(f"{size(fraction * self._num_bytes)} of {size(self._num_bytes)}")
        return ", ".join([*parts, f"{now - self._began:.0f} s"])

    def end(self) -> None:
        if not self._phase:
            return
        took = time.monotonic() - self._began
        self.seconds[self._phase] = self.seconds.get(self._phase, 0.0) + took
        if self._is_terminal:
            moved = f" {size(self._num_bytes)} in" if self._num_bytes else ""
            line = f"\r\x1b[K  {self._phase}{moved} {took:.1f} s"
            print(line, file=self.stream, flush=True)
        self._phase = ""


def bar(fraction: float, width: int = _BAR) -> str:
    filled = int(min(max(fraction, 0.0), 1.0) * width)
    return "█" * filled + "░" * (width - filled)


def table(rows: Sequence[tuple[str, ...]], indent: str = "  ") -> str:
    """Left-aligned columns, as wide as they need to be."""
    if not rows:
        return ""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [
        indent + "  ".join(cell.ljust(width) for cell, width in zip(row, widths)) for row in rows
    ]
    return "\n".join(line.rstrip() for line in lines)


def size(num_bytes: float) -> str:
    """``98.4 MB``-like text in binary units, as memory is counted."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} TiB"


class CountLine:
    """``done of total`` while many things are worked on: redrawn on a terminal, else every 10 s."""

    def __init__(self, total: int, unit: str, stream: TextIO | None = None) -> None:
        self.stream = stream or sys.stderr
        self.total = total
        self.unit = unit
        self._is_terminal = self.stream.isatty()
        self._began = self._drawn = time.monotonic()

    def show(self, done: int, note: str = "") -> None:
        now = time.monotonic()
        if now - self._drawn < (0.1 if self._is_terminal else 10.0) and done < self.total:
            return
        self._drawn = now
        text = f"{done}/{self.total} {self.unit}, {now - self._began:.0f} s{note}"
        if self._is_terminal:
            line = f"\r\x1b[K  {bar(done / max(self.total, 1))} {text}"
            print(line, end="\n" if done >= self.total else "", file=self.stream, flush=True)
        else:
            print(f"  {text}", file=self.stream, flush=True)
