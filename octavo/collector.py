"""The garbage collector of a process that serves.

Every step allocates some objects per stream and frees them again. With Python's own thresholds that
starts collections all the time, and each full one looks through everything that start-up left (the
web framework, a tokenizer's vocabulary): measured in the API process, a fifth of a streamed token's
time, and pauses of 0.1 s.
"""

from __future__ import annotations

import gc

# Objects allocated and not freed before the youngest are looked through; Python: 700 or 2,000.
YOUNGEST = 50_000


def settle() -> None:
    """To be called once by a process of our own when it is ready: what exists is never looked
    through again, and what comes is looked through seldom."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNGEST, 20, 20)
