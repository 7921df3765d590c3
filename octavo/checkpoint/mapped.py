"""Files mapped into memory."""

from __future__ import annotations

import mmap


def forget(mapped: mmap.mmap, offset: int, num_bytes: int) -> None:
    """Gives back the pages that lie inside a range of a mapped file: they can be read again."""
    first = -(-offset // mmap.PAGESIZE) * mmap.PAGESIZE
    size = (offset + num_bytes) // mmap.PAGESIZE * mmap.PAGESIZE - first
    if size > 0 and hasattr(mapped, "madvise"):
        mapped.madvise(mmap.MADV_DONTNEED, first, size)
