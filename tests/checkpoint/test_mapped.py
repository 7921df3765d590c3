"""Pages of a mapped file that are given back: those inside the range and no others."""

from __future__ import annotations

import mmap
import re
from pathlib import Path

import pytest

from octavo.checkpoint.mapped import FAULT_AROUND, forget, forget_read

PAGE = mmap.PAGESIZE


def resident(path: Path) -> int:
    """Bytes of the file's mapping that are in memory and count as this process's."""
    entries = re.split(r"(?m)^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text())
    (entry,) = [entry for entry in entries if entry.splitlines()[:1] and str(path) in entry]
    return int(re.search(r"^Rss:\s+(\d+) kB", entry, re.M)[1]) * 1024


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="needs Linux")
def test_only_whole_pages_inside_the_range_are_given_back(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    path.write_bytes(bytes(range(256)) * (8 * PAGE // 256))
    with path.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    original = mapped[:]  # touches every page
    for page in range(8):
        mapped[page * PAGE + 7] = 99  # this process's own: lost where a page is given back
    assert resident(path) == 8 * PAGE
    forget(mapped, 2 * PAGE + 8, 3 * PAGE)  # pages 3 and 4, parts of 2 and 5
    assert resident(path) == 6 * PAGE
    kept = [page for page in range(8) if mapped[page * PAGE + 7] == 99]
    assert kept == [0, 1, 2, 5, 6, 7]
    assert mapped[3 * PAGE : 5 * PAGE] == original[3 * PAGE : 5 * PAGE]
    forget(mapped, PAGE + 1, PAGE)  # holds no whole page
    assert mapped[PAGE + 7] == mapped[2 * PAGE + 7] == 99
    mapped.close()


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="needs Linux")
def test_small_reads_leave_no_neighbours_behind(tmp_path: Path) -> None:
    """Each read of a few bytes maps the pages around them."""
    path = tmp_path / "weights"
    path.write_bytes(bytes(range(256)) * (5 * FAULT_AROUND // 256) + b"end")
    with path.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    for offset in range(100, len(mapped), FAULT_AROUND // 16):
        assert mapped[offset] == offset % 256
        forget_read(mapped, offset, 16)
    assert mapped[-3:] == b"end"
    forget_read(mapped, len(mapped) - 3, 3)
    assert resident(path) <= 2 * PAGE
    mapped.close()
