"""An engine that makes no progress says so itself: which step hangs, and where every thread is."""

from __future__ import annotations

import faulthandler
import logging
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path

logger = logging.getLogger(__name__)

LATE_SHARE = 0.5  # of --step-deadline: a step that old is called late
# Ranks write the stacks of their threads to stderr when they get it (worker.process).
STACKS_SIGNAL = signal.SIGUSR1
RANK = b"octavo.worker.process"


class Watchdog:
    """Looked after by the heartbeat's thread. What keeps that thread from running, too (a C call
    that holds the interpreter), is caught by faulthandler, whose own needs no interpreter."""

    def __init__(self, deadline: float, describe: Callable[[], str]) -> None:
        """``deadline``: --step-deadline in seconds; ``describe``: what is under way."""
        self._limit = deadline * LATE_SHARE
        self._describe = describe
        self._late = 0.0  # seconds, of what was told

    def look(self, age: float) -> None:
        """``age``: seconds that what is under way has taken; 0: nothing is."""
        faulthandler.dump_traceback_later(max(self._limit, 1.0), file=sys.stderr)
        if age > self._limit and not self._late:
            logger.error(
                "%s has taken %.1f s, half of --step-deadline; the stacks of all threads:\n%s",
                self._describe(), age, stacks(),
            )  # fmt: skip
            _ask_ranks()
        elif self._late and age < self._late:
            logger.warning("it goes on, after %.1f s", self._late)
            self._late = 0.0
            return
        if age > self._limit:
            self._late = age

    def stop(self) -> None:
        faulthandler.cancel_dump_traceback_later()


def stacks() -> str:
    """Of all threads of this process, each under its name; most recent call last."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    parts = []
    for ident, frame in sys._current_frames().items():
        if ident != threading.get_ident():
            parts.append(f"thread {names.get(ident, ident)}:\n")
            parts += traceback.format_stack(frame)
    return "".join(parts)


def _ask_ranks() -> None:
    """Those that compute for this engine on this machine write theirs."""
    for children in Path("/proc/self/task").glob("*/children"):
        for pid in children.read_text().split():
            try:
                if RANK in Path(f"/proc/{pid}/cmdline").read_bytes():
                    os.kill(int(pid), STACKS_SIGNAL)
            except OSError:
                continue  # it has ended
