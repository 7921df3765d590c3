"""The garbage collector, and the free memory, of a process that serves.

Every step allocates some objects per stream and frees them again. With Python's own thresholds that
starts collections all the time, and each full one looks through everything that start-up left (the
web framework, a tokenizer's vocabulary): measured in the API process, a fifth of a streamed token's
time, and pauses of 0.1 s.
"""

from __future__ import annotations

import ctypes
import gc

# Objects allocated and not freed before the youngest are looked through; Python: 700 or 2,000.
YOUNGEST = 20_000
# Collections of one generation for each of the next. Requests outlive the youngest: what they
# leave behind in cycles waits for a full collection, which is short: what start-up left is frozen.
OLDER = 4


def settle() -> None:
    """To be called once by a process of our own when it is ready: what exists is never looked
    through again, and what comes is looked through seldom."""
    gc.collect()
    gc.freeze()
    gc.collect()  # full ones wait for a quarter more objects than the last one found: now few
    gc.set_threshold(YOUNGEST, OLDER, OLDER)
    _return_free_memory()


def _return_free_memory() -> None:
    """What start-up freed goes back to the system: 50 MB of an engine process that has loaded a
    model. Only glibc can be asked to."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
