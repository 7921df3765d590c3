"""Children that end with their parent."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def when_parent_ends(number: int) -> None:
    """The kernel sends this process the signal ``number`` when its parent ends."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, number)


def die_with_parent(parent: int) -> None:
    """The kernel ends this process when its parent ends; at once if that has happened already."""
    when_parent_ends(signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit(1)
