"""Threads for work that would hold up the event loop: long texts, templates, large bodies, answers.

A few threads take it. What they do in Rust (tokenizing) leaves Python to the loop; what they do in
Python shares it with the loop, which waits at most ``SWITCH_INTERVAL`` for its turn. One call of C
that keeps Python to itself is not divided, so its size is bounded where it is made (``bodies``).
"""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from octavo.server.auth import Receive
from octavo.server.errors import ClientGone
from octavo.types import QueueFull

T = TypeVar("T")

NUM_THREADS = 3
MOST_WAITING = 512 << 20  # bytes or characters of all work that waits or runs
MOST_ARRIVING = 256 << 20  # bytes of bodies of which the rest has not come
SWITCH_INTERVAL = 0.001  # seconds; Python: 0.005


class Workers:
    """The threads, and how much they have to do. One per server."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(NUM_THREADS, "octavo-work")
        self._size = 0
        self._num_held = 0
        self._lock = threading.Lock()
        self._num_running = 0
        sys.setswitchinterval(SWITCH_INTERVAL)

    async def run(self, work: Callable[[], T], size: int, receive: Receive | None = None) -> T:
        """What ``work`` returns or raises. ``size``: bytes or characters it has to go through.

        ``receive``, where the body has been read, tells that the client has left: then ClientGone
        is raised at once, and work that has not begun is dropped. Raises QueueFull when too much
        waits.
        """
        if self._size and self._size + size > MOST_WAITING:
            raise QueueFull(
                f"{self._size >> 20} MiB of requests are being read, at most "
                f"{MOST_WAITING >> 20} MiB may be; try again later",
                2.0,
            )
        self._size += size
        job = asyncio.get_running_loop().run_in_executor(self._threads, self._counted, work)
        job.add_done_callback(lambda _: self._leave(size))
        if receive is None:
            return await job
        gone = asyncio.ensure_future(_end_of(receive))
        try:
            await asyncio.wait((job, gone), return_when=asyncio.FIRST_COMPLETED)
            if not job.done():
                raise ClientGone
            return job.result()
        finally:
            gone.cancel()
            if not job.done():
                job.cancel()

    def hold(self, num_bytes: int) -> None:
        """So many more bytes of bodies that are still arriving (or fewer) are kept. Raises
        QueueFull beyond the bound: clients may take their time, and there may be many of them."""
        self._num_held += num_bytes
        if num_bytes > 0 and self._num_held > MOST_ARRIVING:
            raise QueueFull(
                f"{self._num_held >> 20} MiB of requests are arriving, at most "
                f"{MOST_ARRIVING >> 20} MiB may be; try again later",
                2.0,
            )

    def close(self) -> bool:
        """Takes nothing more and drops what waits. Whether some of it is still running."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        return self._num_running > 0

    def _counted(self, work: Callable[[], T]) -> T:
        with self._lock:
            self._num_running += 1
        try:
            return work()
        finally:
            with self._lock:
                self._num_running -= 1

    def _leave(self, size: int) -> None:
        self._size -= size


async def _end_of(receive: Receive) -> None:
    """Returns when the client has closed the connection: all that can come after the body."""
    while (await receive())["type"] != "http.disconnect":
        pass
