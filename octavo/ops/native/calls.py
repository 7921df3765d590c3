"""How kernels are called: at once, or recorded on a tape that runs many of them as one call.

A step of a small model is hundreds of kernels of a few microseconds each. Called one by one from
Python, each of them costs as much again, and wakes the threads anew.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from ctypes import Structure, addressof, c_int64, c_void_p
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.profiler import record_function
from torch.utils._python_dispatch import TorchDispatchMode

from octavo.ops.native import library


class Call(Structure):
    """OctavoCall of csrc/octavo.h."""

    _fields_ = (("kernel", c_void_p), ("arguments", c_void_p))


@cache
def _run() -> library.Kernel:
    return library.function("octavo_run", c_void_p, c_int64)


def call(
    kernel: str, arguments: Structure, *kept: object, then: Callable[[], None] | None = None
) -> None:
    """Runs the kernel of that name, or has the tape that is recording do it when it is run.
    ``kept``: what the arguments point at and nothing else keeps, buffers of ``empty`` excepted.
    ``then``: called afterwards, after the whole tape once: for what a kernel cannot raise."""
    if _here.recording is not None:
        _here.recording.append(kernel, arguments, kept, then)
        return
    _run_one(kernel, Call(library.address(kernel), addressof(arguments)))
    if then is not None:
        then()


def name_kernels(wanted: bool) -> None:
    """Whether this thread's kernels run one by one, each a range of torch's profiler that bears its
    name."""
    _here.named = wanted


def _run_one(kernel: str, one: Call) -> None:
    with record_function(kernel) if _here.named else nullcontext():
        _run()(addressof(one), 1)


def rows_of(tensor: Tensor) -> c_int64:
    """The length of the tensor's first dimension as something that kernels are given the address
    of. On a tape it is what each run says that length to be."""
    tape = _here.recording
    return c_int64(len(tensor)) if tape is None else tape.rows[len(tensor)]


def empty(rows: int, width: int, dtype: torch.dtype) -> Tensor:
    """[rows, width], not set: torch's memory, or the tape's."""
    tape = _here.recording
    if tape is None:
        return torch.empty(rows, width, dtype=dtype)
    return tape.pool.take(rows * width * dtype.itemsize).view(dtype).view(rows, width)


class Pool:
    """Buffers that are used again once no tensor lies in them any more."""

    def __init__(self) -> None:
        self._free: list[mmap.mmap] = []

    def take(self, size: int) -> Tensor:
        """uint8 [size], aligned to a page. Pages are taken from the system when first written."""
        fitting = [buffer for buffer in self._free if len(buffer) >= size]
        if fitting:
            buffer = min(fitting, key=len)
            self._free.remove(buffer)
        else:
            buffer = mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        # torch keeps the array for as long as there is a tensor of this storage.
        lent = (ctypes.c_ubyte * max(size, 1)).from_buffer(buffer)
        weakref.finalize(lent, self._free.append, buffer).atexit = False
        return torch.frombuffer(lent, dtype=torch.uint8)[:size]


class Tape:
    """Calls recorded once, run together any number of times with other numbers of rows.

    ``sizes``: the lengths that tensors' first dimensions have while it records. Each stands for a
    number of rows that every run says, at most that length. Tapes that never run at the same time
    may share a ``pool``.
    """

    def __init__(self, sizes: Sequence[int], pool: Pool) -> None:
        self.rows = {size: c_int64(0) for size in sizes}
        self.pool = pool
        self._calls: Any = []
        self._names: list[str] = []
        self._kept: list[object] = []
        self._then: list[Callable[[], None]] = []

    def append(
        self,
        kernel: str,
        arguments: Structure,
        kept: tuple[object, ...],
        then: Callable[[], None] | None,
    ) -> None:
        if then is not None and then not in self._then:
            self._then.append(then)
        self._calls.append(Call(library.address(kernel), addressof(arguments)))
        self._names.append(kernel)
        self._kept.append((arguments, kept))

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Kernels that this thread calls inside are recorded and not run. What torch computes could
        not be: it raises RuntimeError."""
        assert _here.recording is None
        _here.recording = self
        try:
            with _NothingComputed():
                yield
        finally:
            _here.recording = None
        self._calls = (Call * len(self._calls))(*self._calls)

    def run(self, *rows: int) -> None:
        """rows: for each of the sizes, in their order."""
        for cell, count in zip(self.rows.values(), rows, strict=True):
            cell.value = count
        if _here.named:
            for name, one in zip(self._names, self._calls):
                _run_one(name, one)
        else:
            _run()(addressof(self._calls), len(self._calls))
        for then in self._then:
            then()


class _Here(threading.local):
    """Of a thread: models of one process compute on threads of their own."""

    recording: Tape | None = None
    named = False


_here = _Here()


class _NothingComputed(TorchDispatchMode):
    _ALLOWED = frozenset(("alias", "as_strided", "detach", "empty", "slice", "view"))

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled here. True, torch's own, would import its compiler at the first
        recording: a second of every start and 60 MB."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name not in self._ALLOWED:
            raise RuntimeError(f"torch's {name} cannot be recorded on a tape of CPU kernels")
        return func(*args, **(kwargs or {}))
