"""Which shape a step is run in, and when it is captured."""

from __future__ import annotations

import itertools

import pytest
import torch

from octavo.worker import graphs as module
from octavo.worker.graphs import (
    MIXED_DECODE_ROWS,
    MIXED_PROMPT_ROWS,
    MIXED_PROMPT_TOKENS,
    Graphs,
    Shape,
    decode_sizes,
    largest_shapes,
    padded_mixed,
)
from tests.worker.interpreted import FakeCuda

MAX_SEQS, MAX_ROWS, MAX_TOKENS = 96, 160, 512


@pytest.mark.parametrize("most", [1, 2, 3, 64, 65, 80, 81, 256, 512, 513, 1000, 1024])
def test_decode_sizes_ascend_to_the_most_and_waste_little(most: int) -> None:
    sizes = decode_sizes(most)
    assert sizes == sorted(set(sizes)) and sizes[0] == 1 and sizes[-1] == most
    for rows in range(1, most + 1):
        padded = next(size for size in sizes if size >= rows)
        assert padded - rows <= max(3, 0.3 * rows)


@pytest.mark.parametrize("max_rows,max_tokens", [(72, 72), (160, 512), (320, 2048), (1088, 8192)])
def test_a_padded_step_holds_the_step_a_row_for_the_padding_and_fits_the_buffers(
    max_rows: int, max_tokens: int
) -> None:
    found = set()
    for decode, rows, tokens in itertools.product(
        (0, 1, 8, 9, 100, 256, 700, 1024), (1, 3, 4, 15, 16, 63, 64), (2, 64, 65, 500, 1500, 2048)
    ):
        padded = padded_mixed(Shape(decode, rows, tokens), max_rows, max_tokens)
        if padded is None:
            continue
        found.add(padded)
        assert padded.decode_rows >= decode
        assert padded.prompt_rows > rows and padded.prompt_tokens >= tokens
        assert padded.num_rows <= max_rows and padded.num_tokens <= max_tokens
        assert padded_mixed(Shape(decode, rows, tokens), 10**6, 10**6) == padded
    assert found


def test_steps_too_large_for_a_graph_have_none() -> None:
    for shape in (Shape(1025, 1, 64), Shape(0, 64, 64), Shape(0, 1, 2049)):
        assert padded_mixed(shape, 10**6, 10**6) is None


@pytest.mark.parametrize(
    "seqs,tokens", [(1, 1), (1, 64), (8, 64), (64, 512), (256, 2048), (1024, 8192), (1024, 100)]
)
def test_no_step_that_may_be_captured_is_larger_than_the_largest(seqs: int, tokens: int) -> None:
    max_rows = seqs + MIXED_PROMPT_ROWS[-1]
    max_tokens = max(max_rows, tokens)
    largest = largest_shapes(seqs, max_rows, max_tokens)
    assert len(largest) <= 4 and largest[-1] == Shape(seqs)
    possible = [
        Shape(*sizes)
        for sizes in itertools.product(MIXED_DECODE_ROWS, MIXED_PROMPT_ROWS, MIXED_PROMPT_TOKENS)
    ]
    possible = [s for s in possible if s.num_rows <= max_rows and s.num_tokens <= max_tokens]
    assert set(largest[:-1]) <= set(possible)
    for shape in [*possible, *(Shape(rows) for rows in decode_sizes(seqs))]:
        assert any(
            shape.num_rows <= other.num_rows and shape.num_tokens <= other.num_tokens
            for other in largest
        )


class Bench:
    """Graphs whose steps are counted; ``rehearsed``: the shapes, as they came."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.done: list[Shape] = []
        self.rehearsed: list[Shape] = []
        self.cuda = FakeCuda(monkeypatch, self.done.append)
        self.graphs = Graphs(
            decode_sizes(MAX_SEQS), MAX_ROWS, MAX_TOKENS, self.cuda.record, self.rehearsed.append
        )
        self.largest = largest_shapes(MAX_SEQS, MAX_ROWS, MAX_TOKENS)

    def run(self, *shape: int) -> tuple[Shape | None, str]:
        """The padded shape of a step, and how it was enqueued."""
        padded = self.graphs.fitting(Shape(*shape))
        if padded is None:
            return None, "alone"
        eager, captured, done = len(self.cuda.eager), len(self.cuda.captured), len(self.done)
        self.graphs.run(padded)
        assert self.done[done:] == [padded]
        if len(self.cuda.eager) > eager:
            return padded, "by kernels"
        return padded, "captured" if len(self.cuda.captured) > captured else "replayed"


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Bench:
    made = Bench(monkeypatch)
    made.graphs.reserve(made.largest)
    return made


def test_the_largest_are_captured_first_and_small_tensors_with_the_first(bench: Bench) -> None:
    assert bench.cuda.captured == bench.largest and bench.cuda.num_reserved == 1
    assert not bench.done and not bench.rehearsed
    assert bench.graphs.num_pending == len(decode_sizes(MAX_SEQS)) - 1
    assert bench.run(MAX_SEQS) == (Shape(MAX_SEQS), "replayed")


def test_idle_moments_capture_the_others_from_the_largest_down(bench: Bench) -> None:
    sizes = decode_sizes(MAX_SEQS)
    for left in reversed(range(len(sizes) - 1)):
        assert bench.graphs.num_pending == left + 1
        assert bench.graphs.capture_next()
        assert bench.rehearsed[-1] == bench.cuda.captured[-1] == Shape(sizes[left])
    assert not bench.graphs.capture_next() and bench.graphs.num_pending == 0
    for rows in range(1, MAX_SEQS + 1):
        padded = next(size for size in sizes if size >= rows)
        assert bench.run(rows) == (Shape(padded), "replayed")


def test_until_then_a_somewhat_larger_graph_serves_and_a_much_larger_does_not(
    bench: Bench,
) -> None:
    assert bench.run(MAX_SEQS - 10) == (Shape(MAX_SEQS), "replayed")
    assert bench.run(5) == (Shape(8), "by kernels")
    assert bench.run(7) == (Shape(8), "captured")
    assert bench.run(8) == (Shape(8), "replayed")
    assert bench.run(3) == (Shape(4), "by kernels")  # 8 would be more than twice as many


def test_an_idle_moment_need_not_rehearse_what_has_run(bench: Bench) -> None:
    bench.run(79)
    pending = bench.graphs.num_pending
    while bench.graphs.capture_next():
        pass
    assert pending == len(bench.rehearsed) + (Shape(80) in bench.cuda.eager)
    assert bench.run(79) == (Shape(80), "replayed")


def test_a_step_with_prompts_is_captured_when_its_shape_comes_again(bench: Bench) -> None:
    assert bench.run(3, 2, 100) == (Shape(8, 4, 128), "by kernels")
    assert bench.run(8, 3, 128) == (Shape(8, 4, 128), "captured")
    assert bench.run(0, 3, 128) == (Shape(0, 4, 128), "by kernels")
    for _ in range(3):
        assert bench.run(4, 1, 65) == (Shape(8, 4, 128), "replayed")
    assert bench.run(0, 1, 2000) == (None, "alone")


def test_there_are_at_most_so_many_graphs_of_steps_with_prompts(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MOST_MIXED_GRAPHS", len(bench.largest) - 1 + 2)
    while bench.graphs.capture_next():  # those of single tokens do not count
        pass
    for tokens in (64, 128, 192):
        bench.run(0, 1, tokens)
    assert [bench.run(0, 1, tokens)[1] for tokens in (64, 128, 192, 192, 64)] == [
        "captured", "captured", "alone", "alone", "replayed",
    ]  # fmt: skip


def test_a_capture_that_fails_fails_once_and_its_steps_do_without(bench: Bench) -> None:
    bench.run(0, 1, 64)
    bench.cuda.fail = True
    with pytest.raises(torch.OutOfMemoryError):
        bench.run(0, 1, 64)
    assert bench.cuda.capturing is None
    assert bench.run(0, 1, 64) == (None, "alone")
    assert bench.run(0, 1, 65) == (Shape(0, 4, 128), "by kernels")

    pending = bench.graphs.num_pending
    bench.cuda.fail = True
    with pytest.raises(torch.OutOfMemoryError):
        bench.graphs.capture_next()
    assert bench.graphs.num_pending == pending - 1
    bench.run(10)
    bench.cuda.fail = True
    with pytest.raises(torch.OutOfMemoryError):
        bench.run(10)
    while bench.graphs.capture_next():
        pass
    assert bench.run(10) == (Shape(16), "replayed")
