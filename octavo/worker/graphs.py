"""CUDA graphs of steps, by their padded shape.

The largest step of single tokens is captured before the server is ready; its smaller ones when the
engine is idle, or when one is needed and those there are would be much too large. A step with
prompts in it is captured when its shape comes for the second time: that costs about what enqueueing
it does. All share one memory pool.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

# Beyond 64 rows a step costs by the row, within one of these sizes it costs the same.
SMALL_SIZES = (1, 2, 4, 8, 12, 16, 20, 24, 32, 40, 48, 56, 64)
# Sizes of steps with prompts: coarser, for every combination is a graph of its own.
MIXED_DECODE_ROWS = (0, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
MIXED_PROMPT_ROWS = (4, 16, 64)
MIXED_PROMPT_TOKENS = (*range(64, 512, 64), *range(512, 1024, 128), *range(1024, 2049, 256))
MOST_MIXED_GRAPHS = 128
# A graph of more rows than a step has by this factor is not worth waiting for a better one.
TOO_LARGE = 1.2


@dataclass(frozen=True, slots=True)
class Shape:
    """``decode_rows`` of one token each, then ``prompt_rows`` with ``prompt_tokens`` in all."""

    decode_rows: int
    prompt_rows: int = 0
    prompt_tokens: int = 0

    @property
    def num_rows(self) -> int:
        return self.decode_rows + self.prompt_rows

    @property
    def num_tokens(self) -> int:
        return self.decode_rows + self.prompt_tokens


def decode_sizes(max_rows: int) -> list[int]:
    """Padded row counts up to ``max_rows``, ascending: steps of 16 up to 512, then of 64."""
    sizes = [*SMALL_SIZES, *range(80, 512, 16), *range(512, max_rows, 64)]
    return [*(size for size in sizes if size < max_rows), max_rows]


def padded_mixed(shape: Shape, max_rows: int, max_tokens: int) -> Shape | None:
    """The shape of the graph for a step with prompts, which has a row to spare for the padding of
    tokens; None for one that is large enough to hide its launches, or beyond the buffers."""
    decode = _at_least(shape.decode_rows, MIXED_DECODE_ROWS)
    rows = _at_least(shape.prompt_rows + 1, MIXED_PROMPT_ROWS)
    tokens = _at_least(shape.prompt_tokens, MIXED_PROMPT_TOKENS)
    if decode is None or rows is None or tokens is None:
        return None
    found = Shape(decode, rows, tokens)
    return found if found.num_rows <= max_rows and found.num_tokens <= max_tokens else None


def _at_least(count: int, sizes: Sequence[int]) -> int | None:
    index = bisect.bisect_left(sizes, count)
    return sizes[index] if index < len(sizes) else None


class Graphs:
    """``record(shape)`` enqueues a step on the current stream; it reads and writes memory at fixed
    addresses only. ``rehearse(shape)`` does the same with rows of padding, which changes nothing.

    ``decode_sizes``: row counts to capture, ascending. ``max_rows``, ``max_tokens``: of a step.
    """

    def __init__(
        self,
        decode_sizes: list[int],
        max_rows: int,
        max_tokens: int,
        record: Callable[[Shape], None],
        rehearse: Callable[[Shape], None],
    ) -> None:
        self._record = record
        self._rehearse = rehearse
        self._max_rows = max_rows
        self._max_tokens = max_tokens
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()
        self._captured: dict[Shape, torch.cuda.CUDAGraph] = {}
        self._decode_sizes: list[int] = []  # captured, ascending
        self._pending = list(decode_sizes)
        self._seen: set[Shape] = set()  # mixed, once
        self._num_mixed = 0

    @property
    def num_pending(self) -> int:
        return len(self._pending)

    def capture_next(self) -> bool:
        """Captures the largest step of single tokens that is missing. False if there is none."""
        if not self._pending:
            return False
        self._capture_decode(self._pending[-1])
        return True

    def fitting(self, shape: Shape) -> Shape | None:
        """The shape of the graph that takes this step; None: it is enqueued kernel by kernel."""
        if not shape.prompt_rows:
            return self._fitting_decode(shape.decode_rows)
        padded = padded_mixed(shape, self._max_rows, self._max_tokens)
        if padded is None or padded in self._captured:
            return padded
        if padded in self._seen and self._num_mixed < MOST_MIXED_GRAPHS:
            self._capture(padded)
            self._num_mixed += 1
            return padded
        self._seen.add(padded)
        return None

    def _fitting_decode(self, rows: int) -> Shape | None:
        best = _at_least(rows, self._pending)
        index = bisect.bisect_left(self._decode_sizes, rows)
        found = self._decode_sizes[index] if index < len(self._decode_sizes) else None
        if best is not None and (found is None or (best < found and found > TOO_LARGE * rows)):
            self._capture_decode(best)
            found = best
        return None if found is None else Shape(found)

    def _capture_decode(self, rows: int) -> None:
        shape = Shape(rows)
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            self._rehearse(shape)  # compiles kernels, and libraries take their workspaces
        torch.cuda.current_stream().wait_stream(self._stream)
        self._capture(shape)
        self._pending.remove(rows)
        bisect.insort(self._decode_sizes, rows)

    def replay(self, shape: Shape) -> None:
        self._captured[shape].replay()

    def _capture(self, shape: Shape) -> None:
        """Not by torch.cuda.graph, which waits for the device and empties the allocator."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream):
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                self._record(shape)
            finally:
                graph.capture_end()
        self._captured[shape] = graph
