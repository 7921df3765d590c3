"""CUDA graphs of steps, by their padded shape.

The largest steps are captured before the server is ready: all graphs share one memory pool, which
is then as large as it will ever be. Smaller steps of single tokens are captured when the engine is
idle. Others, and those when what there is would be much too large, are captured when their shape
comes for the second time: that costs about what enqueueing it does.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

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
SMALL = 1 << 20  # bytes of a tensor that the allocator still counts as small


@dataclass(frozen=True, slots=True)
class Shape:
    """``decode_rows`` of one token each, or of ``queries`` with guesses, then ``prompt_rows`` with
    ``prompt_tokens`` in all."""

    decode_rows: int
    prompt_rows: int = 0
    prompt_tokens: int = 0
    queries: int = 1

    @property
    def num_rows(self) -> int:
        return self.decode_rows + self.prompt_rows

    @property
    def num_tokens(self) -> int:
        return self.decode_rows * self.queries + self.prompt_tokens

    @property
    def is_plain(self) -> bool:
        """Whether all rows bring a single token."""
        return not self.prompt_rows and self.queries == 1


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


def padded_guessing(shape: Shape, max_tokens: int) -> Shape | None:
    """The shape of the graph for rows with guesses; None beyond the buffers, which have a draw for
    each token."""
    rows = _at_least(shape.decode_rows, decode_sizes(max(shape.decode_rows, 512)))
    found = None if rows is None else Shape(rows, queries=shape.queries)
    return found if found is not None and found.num_tokens <= max_tokens else None


def largest_shapes(max_seqs: int, max_rows: int, max_tokens: int) -> list[Shape]:
    """Of the steps that may be captured those than which none has both as many rows and as many
    tokens, the one with the most tokens first; the largest of single tokens in any case."""
    shapes = [
        Shape(decode, rows, tokens)
        for decode in MIXED_DECODE_ROWS
        for rows in MIXED_PROMPT_ROWS
        for tokens in MIXED_PROMPT_TOKENS
        if decode + rows <= max_rows and decode + tokens <= max_tokens
    ]
    shapes.sort(key=lambda shape: (shape.num_tokens, shape.num_rows), reverse=True)
    found: list[Shape] = []
    for shape in shapes:
        if not found or shape.num_rows > found[-1].num_rows:
            found.append(shape)
    return [*found, Shape(max_seqs)]


def _at_least(count: int, sizes: Sequence[int]) -> int | None:
    index = bisect.bisect_left(sizes, count)
    return sizes[index] if index < len(sizes) else None


class Graphs:
    """``record(shape)`` enqueues a step on the current stream; it reads and writes memory at fixed
    addresses only. ``rehearse(shape)`` does the same with rows of padding, which changes nothing.

    A shape is enqueued kernel by kernel once before it is captured: that compiles and loads its
    kernels, which must not happen during a capture. A capture that fails is not tried again.

    ``decode_sizes``: row counts to capture, ascending. ``max_rows``, ``max_tokens``: of a step.
    """

    def __init__(
        self,
        decode_sizes: list[int],
        max_rows: int,
        max_tokens: int,
        record: Callable[[Shape], None],
        rehearse: Callable[[Shape], None],
        pool: Any = None,
        most_mixed: int | None = None,
        widths: Sequence[int] = (),
    ) -> None:
        """``pool``: that of other graphs, which are never replayed at the same time.
        ``most_mixed``: most graphs of steps with prompts (MOST_MIXED_GRAPHS). ``widths``: tokens
        that rows with guesses bring; those of up to 64 rows are captured ahead."""
        self._most_mixed = most_mixed
        self._record = record
        self._rehearse = rehearse
        self._max_rows = max_rows
        self._max_tokens = max_tokens
        self.pool = torch.cuda.graph_pool_handle() if pool is None else pool
        self._stream = capture_stream(torch.cuda.current_device())
        self._captured: dict[Shape, torch.cuda.CUDAGraph] = {}
        self._failed: set[Shape] = set()
        self._warm: set[Shape] = set()  # enqueued before, not captured
        self._decode_sizes: list[int] = []  # captured, ascending
        self._pending = list(decode_sizes)
        guessing = (Shape(rows, queries=width) for width in widths for rows in SMALL_SIZES)
        self._pending_guessing = [shape for shape in guessing if shape.num_tokens <= max_rows]

    @property
    def num_pending(self) -> int:
        return len(self._pending) + len(self._pending_guessing)

    def reserve(self, shapes: list[Shape]) -> None:
        """Captures the largest steps, which have been rehearsed: later ones find room in the pool.
        To be called once, before any other capture."""
        for shape in shapes:
            self._capture(shape, first=not self._captured)

    def capture_next(self) -> bool:
        """Captures the largest step of single tokens that is missing, then those with guesses.
        False if there is none."""
        if not self.num_pending:
            return False
        shape = Shape(self._pending[-1]) if self._pending else self._pending_guessing[-1]
        if shape not in self._warm:
            self._rehearse(shape)
        self._capture(shape)
        return True

    def fitting(self, shape: Shape) -> Shape | None:
        """The padded shape in which ``run`` takes this step; None: there is no graph for it, nor
        will there be."""
        if shape.is_plain:
            return self._fitting_decode(shape.decode_rows)
        if shape.queries > 1:
            padded = padded_guessing(shape, self._max_rows)
        else:
            padded = padded_mixed(shape, self._max_rows, self._max_tokens)
        if padded is None or padded in self._captured:
            return padded
        num_mixed = sum(found.prompt_rows > 0 for found in self._captured)
        full = shape.prompt_rows > 0 and num_mixed >= (self._most_mixed or MOST_MIXED_GRAPHS)
        return None if full or padded in self._failed else padded

    def _fitting_decode(self, rows: int) -> Shape | None:
        best = _at_least(rows, self._pending)
        found = _at_least(rows, self._decode_sizes)
        too_large = found is not None and found > TOO_LARGE * rows
        if best is not None and (found is None or (best < found and too_large)):
            found = best
        return None if found is None else Shape(found)

    def run(self, shape: Shape) -> None:
        """Enqueues the staged step, of a shape from ``fitting``."""
        if shape not in self._captured:
            if shape not in self._warm:
                self._warm.add(shape)
                self._record(shape)
                return
            self._capture(shape)
        self._captured[shape].replay()

    def _capture(self, shape: Shape, first: bool = False) -> None:
        """Not by torch.cuda.graph, which waits for the device and empties the allocator."""
        self._failed.add(shape)  # until it has succeeded
        if shape.is_plain and shape.decode_rows in self._pending:
            self._pending.remove(shape.decode_rows)
        if shape in self._pending_guessing:
            self._pending_guessing.remove(shape)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream):
            graph.capture_begin(pool=self.pool, capture_error_mode="thread_local")
            try:
                if first:
                    reserve_small_tensors()
                self._record(shape)
            finally:
                graph.capture_end()
        self._captured[shape] = graph
        self._failed.discard(shape)
        self._warm.discard(shape)
        if shape.is_plain:
            bisect.insort(self._decode_sizes, shape.decode_rows)


@cache
def capture_stream(device: int) -> torch.cuda.Stream:
    """One for all engines of a process: cuBLAS keeps 32 MiB for every stream that it has seen."""
    return torch.cuda.Stream(device)


def reserve_small_tensors() -> None:
    """Takes room from the allocator and gives it back to it, for tensors of up to 1 MiB: they have
    pages of their own, of which the largest steps need the fewest."""
    tensors = [torch.empty(SMALL, dtype=torch.uint8, device="cuda") for _ in range(16)]
    tensors.clear()
