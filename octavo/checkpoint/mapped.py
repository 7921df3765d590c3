"""Files mapped into memory."""

from __future__ import annotations

import mmap

FAULT_AROUND = 2 << 20  # Linux: 64 KiB by default, or a large folio


def forget(mapped: mmap.mmap, offset: int, num_bytes: int) -> None:
    """Gives back the pages that lie inside a range of a mapped file: they can be read again."""
    first = -(-offset // mmap.PAGESIZE) * mmap.PAGESIZE
    size = (offset + num_bytes) // mmap.PAGESIZE * mmap.PAGESIZE - first
    if size > 0 and hasattr(mapped, "madvise"):
        mapped.madvise(mmap.MADV_DONTNEED, first, size)


def forget_read(mapped: mmap.mmap, offset: int, num_bytes: int) -> None:
    """The same of a mapping that nobody has written to, with the pages around the range: where one
    is missing, the system maps others that it has at hand, up to FAULT_AROUND bytes."""
    first = offset // FAULT_AROUND * FAULT_AROUND
    end = -(-(offset + num_bytes) // FAULT_AROUND) * FAULT_AROUND
    forget(mapped, first, min(end, len(mapped)) - first)
