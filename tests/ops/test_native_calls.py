"""Tapes of CPU kernels (octavo/ops/native/calls.py): what is recorded once and run for other
numbers of rows does what the same calls do one by one."""

from __future__ import annotations

import gc
import mmap

import pytest
import torch
from torch import Tensor

from octavo.ops.native import calls, library
from octavo.ops.native.calls import Pool, Tape
from octavo.ops.quantized import quantize
from tests.ops.comparing import randn

if not library.features():
    pytest.skip("there are no CPU kernels, or this CPU runs none", allow_module_level=True)

from octavo.ops.native.linear import NativeLinear, NativeQuantizedLinear
from octavo.ops.native.norm import rms_norm
from octavo.ops.native.rows import take_rows

FP32 = torch.float32
WIDTH = 512  # FP32 rows of it are a multiple of 2 KiB: they are copied before a product


class Chain:
    """Some layers' worth of kernels."""

    def __init__(self) -> None:
        weights = [randn(WIDTH, WIDTH, seed=i).float() / 25 for i in range(3)]
        bias = randn(WIDTH, seed=9).float()
        self.norm = randn(WIDTH, seed=8).float()
        self.first = NativeLinear(weights[:2], bias.repeat(2), "silu_mul")
        self.second = NativeQuantizedLinear([quantize(weights[2], 64)], bias, "add", FP32)
        self.head = NativeLinear([weights[0][:77]], None, "logits")

    def __call__(self, x: Tensor, index: Tensor | None = None) -> tuple[Tensor, Tensor]:
        for _ in range(2):
            x = self.second(self.first(rms_norm(x, self.norm, 1e-5)), x)
        if index is not None:
            x = take_rows(x, index)
        return x, self.head(rms_norm(x, self.norm, 1e-5))


@pytest.fixture(scope="module")
def chain() -> Chain:
    return Chain()


def test_any_number_of_rows_up_to_the_recorded_one_equals_calls_one_by_one(chain: Chain) -> None:
    tape, x = Tape((64,), Pool()), torch.full((64, WIDTH), float("nan"))
    with tape.recording():
        y, logits = chain(x)
    assert y.data_ptr() == x.data_ptr()  # the sum is written over the operand
    for rows in (64, 1, 2, 7, 13, 14, 63, 0, 33):
        given = randn(rows, WIDTH, seed=rows).float()
        expected = chain(given.clone())
        x[:rows], x[rows:] = given, float("nan")
        tape.run(rows)
        assert torch.equal(y[:rows], expected[0])
        assert torch.equal(logits[:rows], expected[1])
        assert y[rows:].isnan().all()  # other rows are left alone


def test_two_numbers_of_rows_are_told_apart(chain: Chain) -> None:
    tape = Tape((64, 65), Pool())
    x, index = torch.zeros(64, WIDTH), torch.zeros(65, dtype=torch.int64)
    with tape.recording():
        y, logits = chain(x, index)
    assert y.shape == (65, WIDTH) and logits.shape == (65, 77)
    for rows, some in ((64, 65), (1, 1), (30, 4), (5, 12), (9, 0)):
        x[:rows] = given = randn(rows, WIDTH, seed=rows).float()
        index[:some] = chosen = torch.arange(some) * 3 % rows
        expected = chain(given.clone(), chosen)
        tape.run(rows, some)
        assert torch.equal(y[:some], expected[0])
        assert torch.equal(logits[:some], expected[1])
    with pytest.raises(ValueError):
        tape.run(3)


def test_a_number_of_rows_that_was_not_announced_is_refused(chain: Chain) -> None:
    x = torch.zeros(32, WIDTH)
    with pytest.raises(KeyError), Tape((64,), Pool()).recording():
        chain(x)
    assert chain(x)[1].isfinite().all()


def test_results_do_not_depend_on_when_other_tapes_of_the_pool_ran(chain: Chain) -> None:
    pool, ways = Pool(), []
    for size in (64, 40, 96):
        tape, x = Tape((size,), pool), pool.take(size * WIDTH * 4).view(FP32).view(size, WIDTH)
        with tape.recording():
            ways.append((tape, x, chain(x)[1]))
    given = randn(30, WIDTH).float()
    expected = chain(given.clone())[1]
    for _ in range(2):
        for tape, x, logits in ways:
            x[:30] = given
            tape.run(30)
            assert torch.equal(logits[:30], expected)


def test_kernels_run_one_by_one_under_their_names_give_the_same(chain: Chain) -> None:
    tape, x = Tape((64,), Pool()), randn(64, WIDTH).float()
    expected = chain(x.clone())[1]
    with tape.recording():
        logits = chain(x)[1]
    calls.name_kernels(True)
    try:
        with torch.profiler.profile() as profile:
            tape.run(64)
    finally:
        calls.name_kernels(False)
    assert torch.equal(logits, expected)
    names = [event.name for event in profile.events() if event.name.startswith("octavo_")]
    assert len(names) == 8 and sum("norm" in name for name in names) == 3


# ---- what is recorded does not run; what torch computes is refused ----


def test_nothing_runs_while_it_is_recorded(chain: Chain) -> None:
    x = randn(64, WIDTH).float()
    before = x.clone()
    with Tape((64,), Pool()).recording():
        logits = chain(x)[1]
    assert torch.equal(x, before) and not logits.any()


OPERATORS = {
    "add": lambda x: x + 1,
    "copy": lambda x: x.T.contiguous(),
    "cat": lambda x: torch.cat((x, x)),
    "index": lambda x: x[torch.tensor([1, 0])],
    "conversion": lambda x: x.double(),
    "in place": lambda x: x.zero_(),
    "item": lambda x: x[0, 0].item(),
}


@pytest.mark.parametrize("operator", OPERATORS.values(), ids=OPERATORS)
def test_what_torch_computes_cannot_be_recorded(chain: Chain, operator) -> None:
    x, tape = torch.zeros(64, WIDTH), Tape((64,), Pool())
    with pytest.raises(RuntimeError, match="cannot be recorded on a tape"), tape.recording():
        operator(rms_norm(x, chain.norm, 1e-5))


def test_after_an_exception_kernels_run_at_once_again(chain: Chain) -> None:
    x = randn(64, WIDTH).float()
    expected = chain(x.clone())[1]
    with pytest.raises(ZeroDivisionError), Tape((64,), Pool()).recording():
        chain(x)
        raise ZeroDivisionError
    found = chain(x.clone())[1]
    assert torch.equal(found, expected)
    assert torch.equal(found + 0, expected)  # torch computes, too
    tape = Tape((64,), Pool())
    with tape.recording():
        logits = chain(x)[1]
    tape.run(64)
    assert torch.equal(logits, expected)


# ---- buffers ----


def extent(tensor: Tensor) -> range:
    return range(tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes)


def overlap(one: range, other: range) -> bool:
    return one.start < other.stop and other.start < one.stop


def test_buffers_are_used_again_and_live_ones_never_overlap() -> None:
    pool, live, places = Pool(), [], set()
    generator = torch.Generator().manual_seed(0)
    for step in range(400):
        size = int(torch.randint(1, 50_000, (), generator=generator))
        taken = pool.take(size)
        assert taken.dtype == torch.uint8 and len(taken) == size
        assert taken.data_ptr() % mmap.PAGESIZE == 0
        assert not any(overlap(extent(taken), extent(other)) for other, _ in live)
        taken.fill_(step % 251)
        # A view keeps a buffer as well as the tensor that was given.
        live.append((taken[size // 2 :] if step % 3 else taken, step % 251))
        places.add(taken.data_ptr())
        del taken
        if len(live) > 7:
            at = int(torch.randint(0, len(live), (), generator=generator))
            kept, filler = live.pop(at)
            assert (kept == filler).all()
            del kept
    assert all((kept == filler).all() for kept, filler in live)
    assert len(places) < 40


def test_the_smallest_buffer_that_fits_is_taken() -> None:
    pool = Pool()
    sizes = (40_000, 9_000, 20_000)
    taken = [pool.take(size) for size in sizes]
    places = {size: tensor.data_ptr() for size, tensor in zip(sizes, taken)}
    del taken
    gc.collect()
    assert pool.take(15_000).data_ptr() == places[20_000]
    assert pool.take(100).data_ptr() == places[9_000]
    held = [pool.take(100), pool.take(100)]
    assert [tensor.data_ptr() for tensor in held] == [places[9_000], places[20_000]]
    assert pool.take(50_000).data_ptr() not in places.values()
    assert len(pool.take(0)) == 0


def test_what_a_tape_holds_outlives_its_tensors(chain: Chain) -> None:
    """The caller keeps the inputs and the outputs, the tape its own buffers' pages."""
    pool = Pool()
    tape, x = Tape((64,), pool), randn(64, WIDTH).float()
    expected = chain(x.clone())[1]
    with tape.recording():
        logits = chain(x)[1]
    gc.collect()
    others = [torch.full((64, WIDTH), float("nan")) for _ in range(50)]
    tape.run(64)
    assert torch.equal(logits, expected)
    assert all(other.isnan().all() for other in others)


def test_within_a_tape_few_buffers_serve_many_calls(
    chain: Chain, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But none that a later tensor still lies in."""
    given: list[tuple[range, int]] = []
    pool = Pool()
    take = pool.take

    def watch(size: int) -> Tensor:
        taken = take(size)
        given.append((extent(taken), size))
        return taken

    monkeypatch.setattr(pool, "take", watch)
    inputs = [torch.zeros(64, WIDTH) for _ in range(3)]
    with Tape((64,), pool).recording():
        kept = [chain(x)[1] for x in inputs]
    assert len(given) > 12 and len({place.start for place, _ in given}) <= 6 + len(kept)
    places = [extent(tensor) for tensor in kept]
    assert not any(overlap(a, b) for a in places for b in places if a is not b)
