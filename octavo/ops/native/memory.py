"""Memory for packed weights, in huge pages where the system grants them.

A pass over a model's weights meets a new page every 4 KiB, whose address must be translated; pages
of 2 MiB are 1.04x faster (Zen 4, SmolLM2-135M's linears in BF16, one row and four).
"""

from __future__ import annotations

import contextlib
import mmap
import threading

import torch
from torch import Tensor

_PAGE = 2 << 20
_CHUNK = 32 << 20  # asked of the system at a time: weights are smaller than a huge page
_LINE = 64

_lock = threading.Lock()
_free = torch.empty(0, dtype=torch.uint8)  # of the last chunk, which it keeps alive


def zeros(size: int) -> Tensor:
    """uint8 [size], zeros, aligned to 64 bytes."""
    global _free
    size = -(-size // _LINE) * _LINE
    with _lock:  # models may load at the same time
        if size > len(_free):
            _free = _chunk(max(_CHUNK, -(-size // _PAGE) * _PAGE))
        taken, _free = _free[:size], _free[size:]
    return taken


def _chunk(size: int) -> Tensor:
    """uint8 [size], aligned to a huge page."""
    pages = mmap.mmap(-1, size + _PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(AttributeError, OSError):  # a system without them
        pages.madvise(mmap.MADV_HUGEPAGE)
    memory = torch.frombuffer(pages, dtype=torch.uint8)
    return memory[-memory.data_ptr() % _PAGE :][:size]
