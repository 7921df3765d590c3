"""The CPU kernels for dense linears (csrc/linear_dense.h), each that runs on this CPU, on shapes of
every kind. The cases that all versions share are in test_ops.py."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from octavo.ops import registry
from octavo.ops.native import library, memory
from octavo.ops.native import linear as module
from octavo.ops.native.library import Features, features
from octavo.ops.native.linear import NativeLinear
from tests.ops.batch_invariance import assert_rows_alike
from tests.ops.comparing import assert_close, expected_linear, randn
from tests.ops.emulated_tiles import EMULATED_DENSE

pytestmark = pytest.mark.usefixtures("one_thread")
BF16, FP32 = torch.bfloat16, torch.float32
EPILOGUES = ("none", "add", "silu_mul", "logits")
(VERSION,) = (v for v in registry.versions("linear") if v.name == "native")
KERNELS = [
    pytest.param((dtype, needed, name), id=name.removeprefix("octavo_linear_"))
    for dtype, kernels in {**module.DENSE, BF16: (*module.DENSE[BF16], EMULATED_DENSE)}.items()
    for needed, name in kernels
    if needed in features()
]


@pytest.fixture(params=KERNELS)
def dtype(request, monkeypatch):
    """Of a kernel, which is the one that runs."""
    dtype, needed, name = request.param
    monkeypatch.setattr(library, "features", lambda: needed)
    monkeypatch.setattr(module, "DENSE", {dtype: ((needed, name),)})
    return dtype


def operand(dtype: torch.dtype, epilogue: str, rows: int, outputs: int) -> torch.Tensor | None:
    return randn(rows, outputs, seed=5).to(dtype) if epilogue == "add" else None


@pytest.mark.parametrize("bias", (False, True))
@pytest.mark.parametrize("epilogue", EPILOGUES)
@pytest.mark.parametrize("inputs", (1, 2, 63, 576))
@pytest.mark.parametrize("outputs", (2, 30, 32, 34, 146))
def test_any_number_of_outputs_and_inputs(dtype, outputs, inputs, epilogue, bias):
    """Rows are followed by NaN, which reading past their end would bring in."""
    rows = 17
    x = torch.full((rows * inputs + 64,), float("nan"), dtype=dtype)
    x[: rows * inputs] = randn(rows * inputs).to(dtype)
    x = x[: rows * inputs].view(rows, inputs)
    weights = [randn(outputs // 2, inputs, seed=seed).to(dtype) / inputs**0.5 for seed in (1, 2)]
    shift = randn(outputs, seed=3).to(dtype) if bias else None
    other = operand(dtype, epilogue, rows, outputs)
    expected = expected_linear(weights, shift, epilogue, x, other)
    found = NativeLinear(weights, shift, epilogue)(x, other)
    assert found.dtype == (torch.float32 if epilogue == "logits" else dtype)
    assert found.shape == expected.shape
    assert_close(found, expected, VERSION, found.dtype)


@pytest.mark.parametrize("epilogue", EPILOGUES)
@pytest.mark.parametrize("outputs", (96, 130))
@pytest.mark.parametrize("rows", (*range(17), 28, 29, 130, 196, 197, 500))
def test_any_number_of_rows(dtype, rows, outputs, epilogue):
    x, other = randn(rows, 96).to(dtype), operand(dtype, epilogue, rows, outputs)
    weight, shift = randn(outputs, 96, seed=1).to(dtype) / 10, randn(outputs, seed=2).to(dtype)
    expected = expected_linear([weight], shift, epilogue, x, other)
    found = NativeLinear([weight], shift, epilogue)(x, other)
    assert found.shape == expected.shape
    if rows:
        assert_close(found, expected, VERSION, found.dtype)


@pytest.mark.parametrize("threads", (2, 3))
@pytest.mark.parametrize("epilogue", EPILOGUES)
@pytest.mark.parametrize(("outputs", "inputs"), ((146, 577), (320, 768)))
def test_a_rows_bits_depend_neither_on_the_batch_nor_on_the_threads(
    dtype, outputs, inputs, epilogue, threads
):
    x, other = randn(450, inputs).to(dtype), operand(dtype, epilogue, 450, outputs)
    linear = NativeLinear(
        [randn(outputs, inputs, seed=1).to(dtype) / inputs**0.5],
        randn(outputs, seed=2).to(dtype),
        epilogue,
    )
    whole = linear(x, None if other is None else other.clone())
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        again = linear(x, None if other is None else other.clone())
        parts = [(n, (37 * n) % (450 - n)) for n in (*range(1, 18), 28, 43, 128, 196, 197, 333)]
        assert_rows_alike(linear, x, other, parts)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(again, whole)


@pytest.mark.parametrize("rows", (1, 6, 7, 31))
def test_rows_a_multiple_of_2_kib_apart(dtype, rows):
    """Their inputs are copied."""
    x, weight = randn(40, 2048).to(dtype), randn(70, 2048, seed=1).to(dtype) / 45
    linear = NativeLinear([weight], None, "none")
    found = linear(x[:rows])
    assert_close(found, expected_linear([weight], None, "none", x[:rows]), VERSION, dtype)
    assert torch.equal(found, linear(x)[:rows])


def test_logits_are_summed_up_and_kept_in_fp32(dtype):
    x, weight = randn(9, 576).to(dtype) * 8, randn(500, 576, seed=1).to(dtype)
    found = NativeLinear([weight], None, "logits")(x)
    exact = expected_linear([weight], None, "none", x)
    # An FP32 sum over ascending inputs: of products in FP32, or of pairs, which are half as many.
    bound = {BF16: 1e-6, FP32: 2e-6}[dtype]
    assert ((found - exact).abs().max() / exact.abs().max()) < bound
    assert found.dtype == FP32 and (found != found.to(BF16)).float().mean() > 0.9


@pytest.mark.parametrize("outputs", (1, 31, 32, 33, 500))
def test_the_largest_logit_is_the_first_of_them(dtype, outputs):
    """As the logits' own argmax, for any number of rows, also where several are as large."""
    x, shift = randn(40, 96).to(dtype), randn(outputs, seed=2).to(dtype)
    weight = randn(outputs, 96, seed=1).to(dtype)
    for bias in (None, shift):
        linear = NativeLinear([weight], bias, "logits")
        for rows in (*range(9), 14, 15, 40):
            values, found = linear.largest(x[:rows])
            assert found.dtype == torch.int64 and found.shape == (rows,)
            logits = linear(x[:rows])
            assert torch.equal(found, logits.argmax(-1))
            assert torch.equal(values, logits.max(-1).values)
    equal = NativeLinear([weight[:1].expand(outputs, -1)], None, "logits")
    assert not equal.largest(x)[1].any()
    late = torch.zeros(outputs, 96, dtype=dtype)
    late[outputs // 2 :] = weight[:1]
    largest = NativeLinear([late], None, "logits").largest(x)[1]
    positive = (x.double() @ weight[0].double()) > 0
    assert torch.equal(largest, torch.where(positive, outputs // 2, 0))


def test_projections_of_any_size_are_fused(dtype):
    x = randn(5, 64).to(dtype)
    weights = [randn(size, 64, seed=size).to(dtype) for size in (40, 7, 1, 33)]
    expected = expected_linear(weights, None, "none", x)
    assert_close(NativeLinear(weights, None, "none")(x), expected, VERSION, dtype)


def test_tensors_that_are_not_contiguous(dtype):
    x, other, weight = (
        randn(64, 6).to(dtype).T,
        randn(40, 6, seed=1).to(dtype).T,
        randn(64, 40, seed=2).to(dtype).T,
    )
    expected = expected_linear([weight], None, "add", x, other)
    assert_close(NativeLinear([weight], None, "add")(x, other), expected, VERSION, dtype)


def test_the_sum_is_written_over_the_operand(dtype):
    linear, other = NativeLinear([randn(40, 64).to(dtype)], None, "add"), randn(3, 40).to(dtype)
    assert linear(randn(3, 64).to(dtype), other).data_ptr() == other.data_ptr()


def test_the_operand_may_be_x(dtype):
    x, weight = randn(20, 64).to(dtype), randn(64, 64, seed=1).to(dtype)
    expected = expected_linear([weight], None, "add", x, x)
    assert_close(NativeLinear([weight], None, "add")(x, x), expected, VERSION, dtype)


def test_weights_are_copied(dtype):
    weight, x = randn(40, 64).to(dtype), randn(3, 64).to(dtype)
    linear = NativeLinear([weight], None, "none")
    before = linear(x)
    weight.zero_()
    assert torch.equal(linear(x), before)


def test_silu_of_large_numbers(dtype):
    negative = (-1e30, -3e9, -1e4, -300.0, -200.0, -130.0, -100.0, -90.0, -89.0, -87.0, -80.0, -1.0)
    values = (*negative, 0.0, 1.0, 80.0, 89.0, 200.0, 1e30, float("inf"))
    x = torch.tensor(values).to(dtype)[:, None]
    ones = torch.ones(1, 1, dtype=dtype)
    linear = NativeLinear([ones, torch.zeros_like(ones)], torch.tensor([0.0, 1.0]), "silu_mul")
    expected = torch.nn.functional.silu(x.double())
    finite = slice(None, -1)
    rtol = max(torch.finfo(dtype).eps / 2, 1e-6)
    torch.testing.assert_close(linear(x)[finite].double(), expected[finite], rtol=rtol, atol=1e-30)


def test_nan_stays_in_its_row(dtype):
    x = randn(20, 64).to(dtype)
    linear = NativeLinear([randn(64, 64, seed=1).to(dtype)], None, "silu_mul")
    before = linear(x)
    x[7, 3] = float("nan")
    found = linear(x)
    assert found[7].isnan().all()
    found[7] = before[7]
    assert torch.equal(found, before)


def test_operands_that_do_not_fit_are_refused(dtype):
    weight, name = randn(40, 64).to(dtype), {BF16: "BF16", FP32: "FP32"}[dtype]
    other_dtype = FP32 if dtype == BF16 else BF16
    x = weight[:3]
    with pytest.raises(ValueError, match="BF16 or FP32"):
        NativeLinear([weight.half()], None, "none")
    with pytest.raises(ValueError, match="BF16 or FP32"):
        NativeLinear([weight, weight.to(other_dtype)], None, "none")
    with pytest.raises(ValueError, match=rf"{name} \[T, 64\], not \S+ \[3, 65\]"):
        NativeLinear([weight], None, "none")(randn(3, 65).to(dtype))
    with pytest.raises(ValueError, match=f"{name}.* not {other_dtype}"):
        NativeLinear([weight], None, "none")(x.to(other_dtype))
    with pytest.raises(ValueError, match="only the epilogue add"):
        NativeLinear([weight], None, "none")(x, randn(3, 40).to(dtype))
    for shape, kind in (((2, 40), dtype), ((3, 41), dtype), ((3, 40), other_dtype)):
        with pytest.raises(ValueError, match=rf"operand {name} \[3, 40\]"):
            NativeLinear([weight], None, "add")(x, torch.zeros(shape, dtype=kind))
    with pytest.raises(ValueError, match="operand"):
        NativeLinear([weight], None, "add")(x)


@pytest.mark.skipif(Features.AMX not in features(), reason="this CPU has no AMX")
@pytest.mark.parametrize("rows", (1, 3, 5, 16, 45))
def test_amx_computes_what_its_emulation_does(monkeypatch, rows):
    """To the last bit, among numbers of all sizes: denormals, sums that leave FP32's range."""
    inputs = 200
    generator = torch.Generator().manual_seed(rows)
    sizes = torch.randint(-130, 66, (rows + 40, inputs), generator=generator)
    values = (torch.ldexp(randn(rows + 40, inputs).double(), sizes)).to(BF16)
    results = []
    for kernel in (module.DENSE[BF16][0], EMULATED_DENSE):
        monkeypatch.setattr(module, "DENSE", {BF16: (kernel,)})
        linear = NativeLinear([values[rows:]], None, "logits")
        results.append(linear(values[:rows]).view(torch.int32))
    assert torch.equal(*results)


def test_only_where_the_cpu_has_the_instruction(monkeypatch):
    found = Features.AVX512_BF16
    monkeypatch.setattr(library, "features", lambda: found)
    available = VERSION.available
    assert available("cpu", BF16) and not available("cuda", BF16)
    assert not available("cpu", FP32) and not available("cpu", torch.float16)
    found = Features.AVX2 | Features.AVX512
    assert not available("cpu", BF16) and available("cpu", FP32) and not available("cuda", FP32)
    assert library.preferred(module.DENSE[FP32]) == "octavo_linear_f32_avx512"
    found = Features.AVX2
    assert not available("cpu", BF16) and available("cpu", FP32)
    assert library.preferred(module.DENSE[FP32]) == "octavo_linear_f32_avx2"
    found = ~Features(0)
    assert library.preferred(module.DENSE[BF16]) == "octavo_linear_bf16_amx"
    found = Features(0)
    assert not available("cpu", BF16) and not available("cpu", FP32)


def test_preferred_to_onednn_though_imported_before_it():
    program = (
        "import octavo.ops.native.linear; from octavo.ops import registry;"
        "print(*(version.name for version in registry.versions('linear')))"
    )
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert found.stdout.split() == ["torch", "onednn", "native"]


@pytest.mark.parametrize("size", (1, 64, 1000, 3 << 20, 70 << 20))
def test_memory_for_weights_is_zero_aligned_and_its_own(size):
    first, second = memory.zeros(size), memory.zeros(size)
    for memory_taken in (first, second):
        assert memory_taken.data_ptr() % 64 == 0 and len(memory_taken) >= size
        assert not memory_taken[:: 1 + size // 1000].any()
    first.fill_(1)
    assert not second.any()
