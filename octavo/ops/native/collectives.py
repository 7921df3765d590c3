"""Collectives of ranks on one host, through memory that all of them have mapped
(csrc/shared_collectives.h)."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from ctypes import Structure, addressof, c_int32, c_int64, c_void_p

import torch
from torch import Tensor

from octavo.ops.native import calls, library
from octavo.ops.native.library import Features

# Of a rank's two buffers: a longer tensor goes in pieces, each of which is waited for twice. With
# 256 KiB a prompt's sums took about twice as long where other work had the cores, too.
CAPACITY = 1 << 20
SPIN_SECONDS = 50e-6  # for another rank at full speed, where each has cores of its own
_ENDED = 1
_ELEMENTS = {
    torch.float32: 0,
    torch.bfloat16: 1,
    torch.float16: 2,
    torch.float64: 3,
    torch.int32: 4,
    torch.int64: 5,
}


class _Shared(Structure):
    """OctavoShared of csrc/octavo.h."""

    _fields_ = (
        ("memory", c_void_p),
        *((name, c_int64) for name in ("rank", "size", "capacity", "spin", "timeout")),
        ("processes", c_void_p),
        *((name, c_int64) for name in ("begun", "failure", "failed_rank")),
    )


class _AllReduce(Structure):
    """OctavoAllReduceCall."""

    _fields_ = (
        *((name, c_void_p) for name in ("group", "x", "rows")),
        *((name, c_int64) for name in ("width", "element")),
    )


class _AllGather(Structure):
    """OctavoAllGatherCall."""

    _fields_ = tuple((name, c_void_p) for name in ("group", "x", "y", "rows", "widths"))


class _Broadcast(Structure):
    """OctavoBroadcastCall."""

    _fields_ = (
        *((name, c_void_p) for name in ("group", "x", "rows")),
        *((name, c_int64) for name in ("row_bytes", "source")),
    )


def problem() -> str:
    """Why there are none here; empty if there are."""
    if library.problem():
        return f"CPU kernels {library.problem().partition(',')[0]}"
    return "" if Features.AVX2 in library.features() else "a CPU without AVX2"


def memory_size(size: int) -> int:
    """Bytes that ``size`` ranks share."""
    found: int = library.function("octavo_shared_bytes", c_int64, c_int64)(size, CAPACITY)
    return found


class SharedGroup:
    """One rank of those that share a memory; all make the same calls in the same order, one at a
    time. Every call raises ``failed`` of a line that names the rank where another one has ended or
    does not come within ``timeout`` seconds, and from then on at once."""

    def __init__(
        self,
        memory: mmap.mmap,
        rank: int,
        processes: Sequence[int],
        timeout: float,
        spins: bool = True,
        names: Sequence[int] | None = None,
        failed: Callable[[str], Exception] = RuntimeError,
    ) -> None:
        """``memory``: ``memory_size`` bytes, zeros before the first call. ``processes``: the ranks'
        ids; 0: one whose end is not looked for. ``spins``: whether each has cores of its own.
        ``names``: the numbers by which errors name the ranks."""
        self._lent = (ctypes.c_ubyte * len(memory)).from_buffer(memory)
        names = names or range(len(processes))
        self._names = [f"rank {name} (pid {pid})" for name, pid in zip(names, processes)]
        self._files = [_pidfd(pid) for pid in processes]
        self._pidfds = (c_int32 * len(processes))(*self._files)
        self._shared = _Shared(
            memory=addressof(self._lent),
            rank=rank,
            size=len(processes),
            capacity=CAPACITY,
            spin=int(SPIN_SECONDS * 1e9) if spins else 0,
            timeout=int(timeout * 1e9),
            processes=addressof(self._pidfds),
        )
        self._at = addressof(self._shared)
        self._timeout = timeout
        self._failed = failed
        self._kept = (self._lent, self._pidfds, self._shared)

    def __del__(self) -> None:
        for file in self._files:
            if file >= 0:
                os.close(file)

    @property
    def begun(self) -> int:
        """Exchanges so far. From any thread."""
        return int(self._shared.begun)

    def all_reduce(self, x: Tensor) -> None:
        """x: [T, …], contiguous, becomes the sum of all ranks', in order of ranks; what is narrower
        than FP32 is summed in that. A tape can hold it. Raises TypeError for a dtype that has no
        sums here."""
        if x.dtype not in _ELEMENTS or not x.is_contiguous():
            layout = "contiguous" if x.is_contiguous() else "strided"
            raise TypeError(f"no sum over ranks of a {layout} tensor of {x.dtype}")
        rows = calls.rows_of(x)
        width = x.numel() // max(1, len(x))
        pointers = (self._at, x.data_ptr(), addressof(rows))
        arguments = _AllReduce(*pointers, width, _ELEMENTS[x.dtype])
        calls.call("octavo_all_reduce_avx2", arguments, rows, self._kept, then=self.check)

    def all_gather(self, x: Tensor, sizes: Sequence[int]) -> Tensor:
        """x: [T, sizes[rank]]. [T, sum(sizes)], the ranks' columns side by side."""
        x, rows = x.contiguous(), calls.rows_of(x)
        y = calls.empty(len(x), sum(sizes), x.dtype)
        widths = (c_int64 * len(sizes))(*(size * x.element_size() for size in sizes))
        pointers = (self._at, x.data_ptr(), y.data_ptr(), addressof(rows), addressof(widths))
        arguments = _AllGather(*pointers)
        calls.call("octavo_all_gather", arguments, rows, widths, self._kept, then=self.check)
        return y

    def broadcast(self, x: Tensor, source: int) -> None:
        """x, contiguous, becomes what the rank ``source`` has in it."""
        assert x.is_contiguous()
        rows = calls.rows_of(x)
        row_bytes = x.numel() * x.element_size() // max(1, len(x))
        arguments = _Broadcast(self._at, x.data_ptr(), addressof(rows), row_bytes, source)
        calls.call("octavo_broadcast", arguments, rows, self._kept, then=self.check)

    def check(self) -> None:
        """Raises where an exchange has failed: what it gave counts for nothing then."""
        shared = self._shared
        if shared.failure:
            name, ended = self._names[shared.failed_rank], shared.failure == _ENDED
            raise self._failed(
                f"{name} has ended" if ended else f"{name} has not come within {self._timeout:g} s"
            )


def _pidfd(pid: int) -> int:
    """-1 where its end need not or cannot be looked for: who started it does that, too."""
    if pid > 0 and pid != os.getpid():
        with suppress(OSError):
            return os.pidfd_open(pid)
    return -1
