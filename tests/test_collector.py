"""The collector of a serving process: what exists is left alone, what comes is still collected."""

from __future__ import annotations

import subprocess
import sys

CODE = """
import gc, weakref
from octavo import collector

class Request:
    pass

old = [Request() for _ in range(1000)]
collector.settle()
assert gc.get_freeze_count() > 1000
assert not any(isinstance(found, Request) for found in gc.get_objects())

ended = Request()
ended.itself = ended
ended, left = None, weakref.ref(ended)
kept = [[] for _ in range(collector.YOUNGEST + 1)]
assert left() is None
"""


def test_what_start_up_left_is_not_looked_through_and_cycles_are_still_found() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
