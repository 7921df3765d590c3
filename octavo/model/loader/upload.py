"""Bytes of files to a GPU: several readers, each with pinned buffers and a stream of its own.

A file is read into page-locked memory and copied from there while the next piece is read; host
memory is READERS * 2 * PIECE bytes however large the checkpoint is. Reading is by ``preadv``: one
thread gets some 2 GB/s out of the page cache, and a mapped file would cost a fault per page.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

from octavo.machine import available_cores
from octavo.types import ConfigError

READERS = 8
PIECE = 8 << 20


class Uploader:
    """``device``: "cuda" (its current GPU), or "cpu", where pieces are only copied (tests)."""

    def __init__(self, device: str, readers: int | None = None, piece: int = PIECE) -> None:
        self.device = device
        self._piece = piece
        self._pool = ThreadPoolExecutor(
            readers or max(2, min(READERS, available_cores())), "octavo-reader"
        )
        self._lanes = threading.local()
        self._files: dict[Path, int] = {}
        self._index = torch.cuda.current_device() if device == "cuda" else 0

    def begin(self, file: Path, offset: int, num_bytes: int) -> Callable[[], Tensor]:
        """Starts to bring bytes of ``file`` to the device. The call returned waits for them: uint8
        [num_bytes], ready for the caller's stream. It raises ConfigError if they cannot be read.
        Call both from one thread, on one stream."""
        target = torch.empty(num_bytes, dtype=torch.uint8, device=self.device)
        # The memory may have belonged to something that the caller's stream has yet to finish.
        free = self._event()
        descriptor = self._open(file)
        pieces = [
            self._pool.submit(
                self._bring, descriptor, offset + low, target[low : low + self._piece], free
            )
            for low in range(0, num_bytes, self._piece)
        ]
        return lambda: self._finish(file, target, pieces)

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)
        for descriptor in self._files.values():
            os.close(descriptor)
        self._files.clear()

    def _open(self, file: Path) -> int:
        if file not in self._files:
            self._files[file] = os.open(file, os.O_RDONLY)
        return self._files[file]

    def _event(self) -> torch.cuda.Event | None:
        if self.device != "cuda":
            return None
        event = torch.cuda.Event()
        event.record()
        return event

    def _bring(
        self, descriptor: int, offset: int, target: Tensor, free: torch.cuda.Event | None
    ) -> torch.cuda.Event | None:
        """On a reader's thread. Returns the event after which ``target`` is filled."""
        lane = getattr(self._lanes, "lane", None)
        if lane is None:
            lane = self._lanes.lane = _Lane(self.device, self._index, self._piece)
        buffer: Tensor = lane.next_buffer()[: len(target)]
        _read_exactly(descriptor, buffer.numpy().data, offset)
        done: torch.cuda.Event | None = lane.copy(buffer, target, free)
        return done

    def _finish(
        self, file: Path, target: Tensor, pieces: list[Future[torch.cuda.Event | None]]
    ) -> Tensor:
        for piece in pieces:
            try:
                done = piece.result()
            except OSError as error:
                cause = error.strerror or error
                raise ConfigError(f"{file}: cannot be read: {cause}") from error
            if done is not None:
                done.wait()
        return target


class _Lane:
    """A reader's two staging buffers: one is filled while the other one is copied."""

    def __init__(self, device: str, index: int, size: int) -> None:
        pinned = device == "cuda"
        if pinned:
            torch.cuda.set_device(index)
        self._stream = torch.cuda.Stream() if pinned else None
        self._buffers = [torch.empty(size, dtype=torch.uint8, pin_memory=pinned) for _ in range(2)]
        self._copied: list[torch.cuda.Event | None] = [None, None]
        self._turn = 0

    def next_buffer(self) -> Tensor:
        """The buffer used longest ago, once its copy is done."""
        self._turn ^= 1
        copied = self._copied[self._turn]
        if copied is not None:
            copied.synchronize()
        return self._buffers[self._turn]

    def copy(
        self, buffer: Tensor, target: Tensor, free: torch.cuda.Event | None
    ) -> torch.cuda.Event | None:
        if self._stream is None:
            with torch.inference_mode():  # as where ``target`` was made
                target.copy_(buffer)
            return None
        with torch.inference_mode(), torch.cuda.stream(self._stream):
            if free is not None:
                free.wait()
            target.copy_(buffer, non_blocking=True)
            done = torch.cuda.Event()
            done.record()
        self._copied[self._turn] = done
        return done


def _read_exactly(descriptor: int, view: memoryview, offset: int) -> None:
    while len(view):
        count = os.preadv(descriptor, [view], offset)
        if not count:
            raise OSError(f"it ends at byte {offset}: it has become shorter")
        view, offset = view[count:], offset + count
