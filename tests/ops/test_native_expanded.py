"""The CPU kernels for linears on weights that are expanded (csrc/linear_expanded.h), each that runs
on this CPU, against the definition in FP64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from octavo.ops import registry
from octavo.ops.native import expanded as module
from octavo.ops.native import library
from octavo.ops.native.calls import Pool, Tape
from octavo.ops.native.expanded import NativeWeightOnlyLinear
from octavo.ops.native.library import Features, features
from octavo.ops.weights import Float8Weight, Outliers, Quantized, QuantizedWeight, TableWeight
from tests.ops.batch_invariance import assert_rows_alike
from tests.ops.comparing import assert_close, randn
from tests.ops.emulated_tiles import EMULATED_EXPANDED

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
EPILOGUES = ("none", "add", "silu_mul", "logits")
DEFINITION, *OTHERS = registry.versions("weight_only_linear")
VERSION = next(version for version in OTHERS if version.name == "native")
BY_DTYPE = {**module.EXPANDED, BF16: (*module.EXPANDED[BF16], EMULATED_EXPANDED)}
KERNELS = [
    pytest.param((dtype, needed, name), id=name.removeprefix("octavo_linear_expanded_"))
    for dtype, kernels in BY_DTYPE.items()
    for needed, name in kernels
    if needed in features()
]
if not KERNELS:
    pytest.skip("there are no CPU kernels, or this CPU runs none", allow_module_level=True)
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(params=KERNELS)
def dtype(request, monkeypatch) -> torch.dtype:
    """Of a kernel, which is the one that runs."""
    dtype, needed, name = request.param
    monkeypatch.setattr(library, "features", lambda: needed)
    monkeypatch.setattr(module, "EXPANDED", {dtype: ((needed, name),)})
    return dtype


# ---- weights of every kind, of about the size that a model's have ----

Make = Callable[[int, int, int], Quantized]


def codes_of(outputs: int, inputs: int, bits: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 1 << bits, (outputs, inputs), generator=generator)
    return codes.to(torch.uint8)


def scales_of(outputs: int, inputs: int, group: int, seed: int, unit: float) -> Tensor:
    groups = -(-inputs // group) if group else 1
    return ((1 + randn(outputs, groups, seed=seed).abs()) * unit / inputs**0.5).float()


def grid(bits: int, group: int, kind: str = "", scales: torch.dtype = FP16) -> Make:
    """``kind``: "zero" in common, "zeros" of groups, "minimums", "order"."""

    def make(outputs: int, inputs: int, seed: int) -> QuantizedWeight:
        codes = codes_of(outputs, inputs, bits, seed)
        factors = scales_of(outputs, inputs, group, seed, 2.0**-bits).to(scales)
        lows = (randn(*factors.shape, seed=seed + 1) / inputs**0.5).to(scales)
        zeros = codes_of(*factors.shape, bits, seed + 2)
        generator = torch.Generator().manual_seed(3)  # the same of weights that are fused
        return QuantizedWeight(
            codes,
            factors,
            lows if kind == "minimums" else None,
            bits,
            group,
            zero=1 << (bits - 1) if kind == "zero" else 0,
            zeros=zeros if kind in ("zeros", "order") else None,
            order=torch.randperm(inputs, generator=generator) if kind == "order" else None,
        )

    return make


def table(bits: int, group: int = 0, each: bool = False, outliers: float = 0.0) -> Make:
    """``each``: every output has a table. ``outliers``: their share."""

    def make(outputs: int, inputs: int, seed: int) -> TableWeight:
        numbers = randn(outputs if each else 1, 1 << bits, seed=7 + seed * each).float()
        numbers = numbers / (1.0 if group else inputs**0.5)
        return TableWeight(
            codes_of(outputs, inputs, bits, seed),
            numbers if each else numbers[0],
            scales_of(outputs, inputs, group, seed, 1.0) if group else None,
            bits,
            group,
            some_outliers(outputs, inputs, outliers, seed) if outliers else None,
        )

    return make


def some_outliers(outputs: int, inputs: int, share: float, seed: int) -> Outliers:
    rows, columns = (randn(outputs, inputs, seed=seed + 5).abs() < share).nonzero(as_tuple=True)
    starts = torch.cat((torch.zeros(1), torch.bincount(rows, minlength=outputs).cumsum(0))).int()
    return Outliers(starts, columns.int(), randn(len(rows), seed=seed + 6).float() / inputs**0.5)


def float8(kind: torch.dtype, block: tuple[int, int]) -> Make:
    def make(outputs: int, inputs: int, seed: int) -> Float8Weight:
        values = (randn(outputs, inputs, seed=seed).float() * 60).clamp(-440, 440).to(kind)
        if inputs > 8:
            small = torch.arange(1, 8, dtype=torch.uint8)  # below the normal numbers
            values.view(torch.uint8)[0, :7] = small
        span, group = block
        shape = (-(-outputs // span) if span else 1, inputs)
        return Float8Weight(values, scales_of(*shape, group, seed, 0.01), block)

    return make


E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
KINDS: dict[str, Make] = {
    "2 bits, zeros": grid(2, 32, "zeros"),
    "2 bits, minimums of 16": grid(2, 16, "minimums", FP32),
    "3 bits, zero": grid(3, 128, "zero"),
    "3 bits, zeros, order": grid(3, 128, "order"),
    "4 bits, zeros": grid(4, 64, "zeros", FP32),
    "4 bits, minimums of 4": grid(4, 4, "minimums"),
    "4 bits, one scale": grid(4, 65_536, "zero"),
    "4 bits, one zero of each": grid(4, 65_536, "zeros"),
    "8 bits, zero": grid(8, 64, "zero"),
    "8 bits, zeros, order": grid(8, 20, "order", FP32),
    "8 bits, one scale": grid(8, 65_536, "zero", FP32),
    "NF4": table(4, 64),
    "IQ4": table(4, 32),
    "table of 3 bits": table(3, 36),
    "table of 2 bits": table(2),
    "SqueezeLLM 4": table(4, each=True),
    "SqueezeLLM 3, sparse": table(3, each=True, outliers=0.03),
    "tables of 2 bits": table(2, each=True),
    "tables of 4 bits and scales": table(4, 64, each=True),
    "tables of 3 bits and scales": table(3, 8, each=True, outliers=0.01),
    "tables of 2 bits and scales": table(2, 32, each=True),
    "E4M3": float8(E4M3, (0, 0)),
    "E4M3 of channels": float8(E4M3, (1, 0)),
    "E4M3 of blocks": float8(E4M3, (128, 128)),
    "E5M2 of blocks": float8(E5M2, (16, 24)),
    "E5M2": float8(E5M2, (0, 0)),
}


def expected(
    weights: list[Quantized], bias: Tensor | None, epilogue: str, x: Tensor, other: Tensor | None
) -> Tensor:
    """The definition on the numbers that weights stand for, in FP64."""
    wide = [weight.dense().double() for weight in weights]
    exact = DEFINITION.call(wide, bias, epilogue, torch.float64)
    return exact(x.double(), None if other is None else other.double())


def check(
    weights: list[Quantized], rows: int, dtype: torch.dtype, epilogue: str, bias: bool = False
) -> None:
    inputs, outputs = weights[0].shape[1], sum(w.shape[0] for w in weights)
    x = randn(rows, inputs).to(dtype)
    shift = randn(outputs, seed=3).to(dtype) if bias else None
    other = randn(rows, outputs, seed=4).to(dtype) if epilogue == "add" else None
    exact = expected(weights, shift, epilogue, x, other)
    found = NativeWeightOnlyLinear(weights, shift, epilogue, dtype)(x, other)
    assert found.dtype == (FP32 if epilogue == "logits" else dtype)
    assert found.shape == exact.shape
    if rows:
        assert_close(found, exact, VERSION, dtype)


@pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)
def test_any_kind_and_number_of_inputs(dtype, make):
    """Also not a multiple of the group, and fewer."""
    for inputs in (1, 3, 64, 131, 577):
        some = make(70, inputs, 1)
        for rows in (2, 33):
            check([some], rows, dtype, "none")


@pytest.mark.parametrize("epilogue", EPILOGUES)
@pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)
def test_any_epilogue_and_number_of_outputs(dtype, make, epilogue):
    for index, outputs in enumerate((2, 34, 146)):
        check([make(outputs, 72, 1)], 7, dtype, epilogue, bias=index > 0)


@pytest.mark.parametrize("epilogue", EPILOGUES)
def test_any_number_of_rows(dtype, epilogue):
    makes = [KINDS["NF4"], KINDS["3 bits, zeros, order"], KINDS["SqueezeLLM 3, sparse"]]
    weights = [make(98, 96, 1) for make in makes]
    for rows in (*range(18), 28, 29, 31, 32, 33, 70, 98, 99, 196, 197, 230):
        check([weights[rows % 3]], rows, dtype, epilogue)


def test_rows_a_multiple_of_2_kib_apart(dtype):
    """Their inputs are copied."""
    for name in ("4 bits, zeros", "SqueezeLLM 3, sparse"):
        some = KINDS[name](40, 1024, 1)
        for rows in (1, 8, 40):
            check([some], rows, dtype, "none")


@pytest.mark.parametrize("epilogue", ("none", "silu_mul"))
@pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)
def test_projections_are_fused(dtype, make, epilogue):
    sizes = (40, 40) if epilogue == "silu_mul" else (40, 7, 1, 33)
    weights = [make(size, 64, seed) for seed, size in enumerate(sizes)]
    check(weights, 5, dtype, epilogue, bias=True)


@pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)
def test_rows_are_those_of_the_expanded_weight_exactly(dtype, make):
    """Tables of each output are kept in the type of x."""
    ids = torch.tensor([0, 69, 3, 3, 31, 32, 68, 1])
    for inputs in (57, 300):
        some = make(70, inputs, 1)
        if isinstance(some, TableWeight) and some.table.dim() == 2:
            some = replace(some, table=some.table.to(dtype).float())
        linear = NativeWeightOnlyLinear([some], None, "logits", dtype)
        assert torch.equal(linear.rows(ids), some.dense()[ids].to(dtype))
        assert linear.rows(ids[:0]).shape == (0, inputs)


@pytest.mark.parametrize("outputs", (1, 33, 200))
def test_the_largest_logit_is_the_first_of_them(dtype, outputs):
    for name in ("3 bits, zero", "E4M3 of channels", "SqueezeLLM 3, sparse"):
        x = randn(40, 96).to(dtype)
        linear = NativeWeightOnlyLinear([KINDS[name](outputs, 96, 1)], None, "logits", dtype)
        for rows in (0, 1, 2, 15, 40):
            assert torch.equal(linear.largest(x[:rows])[1], linear(x[:rows]).argmax(-1))


def test_scales_of_outputs_and_whole_numbers_are_not_rounded(dtype):
    """Also with inputs in BF16: what remains are the FP32 sums."""
    x = randn(20, 320).to(dtype)
    for name in ("4 bits, one scale", "8 bits, one scale", "E4M3", "E4M3 of channels", "E5M2"):
        some = KINDS[name](50, 320, 1)
        found = NativeWeightOnlyLinear([some], None, "logits", dtype)(x)
        exact = expected([some], None, "none", x, None)
        assert ((found - exact).abs().max() / exact.abs().max()) < 1e-6, name


BATCHED = ("4 bits, minimums of 4", "3 bits, zeros, order", "SqueezeLLM 3, sparse", "E4M3")


@pytest.mark.parametrize("epilogue", EPILOGUES)
@pytest.mark.parametrize("name", BATCHED)
def test_a_rows_bits_depend_neither_on_the_batch_nor_on_the_threads(dtype, name, epilogue):
    for outputs, inputs in ((146, 577), (64, 1024)):
        x = randn(230, inputs).to(dtype)
        other = randn(230, outputs, seed=5).to(dtype) if epilogue == "add" else None
        some = KINDS[name](outputs, inputs, 1)
        linear = NativeWeightOnlyLinear([some], randn(outputs, seed=2), epilogue, dtype)
        whole = linear(x, None if other is None else other.clone())
        torch.set_num_threads(3)
        assert torch.equal(linear(x, None if other is None else other.clone()), whole)
        torch.set_num_threads(1)
        parts = [(n, (37 * n) % (230 - n)) for n in (1, 2, 3, 6, 7, 14, 15, 16, 17, 33, 99, 197)]
        assert_rows_alike(linear, x, other, parts)


def test_on_a_tape_any_number_of_rows_gives_the_same(dtype):
    linears = [
        NativeWeightOnlyLinear([KINDS[name](512, 512, 1)], None, "none", dtype) for name in BATCHED
    ]
    tape, x = Tape((40,), Pool()), torch.zeros(40, 512, dtype=dtype)
    ids = torch.arange(40)
    with tape.recording():
        found = [*(linear(x) for linear in linears), linears[1].rows(ids)]
    for rows in (40, 1, 13, 0, 33):
        x[:rows] = randn(rows, 512, seed=rows).to(dtype)
        tape.run(rows)
        for y, linear in zip(found, linears):
            assert torch.equal(y[:rows], linear(x[:rows]))
        assert torch.equal(found[-1][:rows], linears[1].rows(ids[:rows]))


def test_what_is_no_number_stays_in_its_row(dtype):
    x = randn(40, 100).to(dtype)
    linear = NativeWeightOnlyLinear(
        [KINDS["3 bits, zeros, order"](64, 100, 1)], None, "none", dtype
    )
    before = linear(x)
    assert before.isfinite().all()
    x[7, 3] = float("nan")
    found = linear(x)
    assert found[7].isnan().all()
    found[7] = before[7]
    assert torch.equal(found, before)


def test_packed_weights_are_as_small_as_their_codes(dtype):
    """Bits of a weight: of its code, and of 128 inputs a scale in FP16 and a zero of a byte."""

    def bits(make: Make) -> float:
        linear = NativeWeightOnlyLinear([make(64, 1024, 1)], None, "none", dtype)
        return 8 * len(linear._panels) / (64 * 1024)

    assert bits(grid(2, 128, "zeros")) == 2 + 24 / 128
    assert bits(grid(3, 128, "zeros")) == 3 + 24 / 128
    assert bits(grid(4, 32, "zero")) == 4.5
    assert bits(float8(E4M3, (1, 0))) == 8
    assert bits(float8(E4M3, (128, 128))) == 8.25
    assert bits(table(3, each=True)) == 3 + 8 * dtype.itemsize * 8 / 1024


def test_weights_that_cannot_be_expanded_are_refused(dtype):
    bad = float8(E4M3, (1, 0))(4, 8, 1)
    bad.values.view(torch.uint8)[1, 2] = 255
    for weights, message in (
        ([bad], "no numbers"),
        ([table(4, 6)(4, 12, 1)], "a group of weights to expand has 6 inputs"),
        ([torch.zeros(4, 8)], "a dense weight has nothing to expand"),
        ([bad, table(4, 8)(4, 8, 1)], "different kinds"),
    ):
        with pytest.raises(ValueError, match=message):
            NativeWeightOnlyLinear(weights, None, "none", dtype)


def test_only_where_a_kernel_runs(monkeypatch):
    for found, wide, narrow in (
        (~Features(0), "f32_avx512", "bf16_amx"),
        (~Features.AMX, "f32_avx512", "bf16_avx512bf16"),
        (Features.AVX2, "f32_avx2", None),
        (Features(0), None, None),
    ):
        monkeypatch.setattr(library, "features", lambda found=found: found)
        for dtype, name in ((FP32, wide), (BF16, narrow)):
            kernel = library.preferred(module.EXPANDED[dtype])
            assert kernel == (None if name is None else f"octavo_linear_expanded_{name}")
            assert VERSION.available("cpu", dtype) == (name is not None)
        assert not VERSION.available("cpu", FP16) and not VERSION.available("cuda", BF16)
