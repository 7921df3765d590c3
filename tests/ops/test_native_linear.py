"""The CPU kernels for linears in BF16 (csrc/linear.h) on shapes of every kind. The cases that all
versions share are in test_ops.py."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from octavo.ops import registry
from octavo.ops.native import linear as module
from octavo.ops.native import memory
from octavo.ops.native.library import Features
from octavo.ops.native.linear import NativeLinear
from tests.ops.batch_invariance import assert_rows_alike
from tests.ops.comparing import assert_close, expected_linear, randn

BF16 = torch.bfloat16
EPILOGUES = ("none", "add", "silu_mul", "logits")
VERSION = next(v for v in registry.versions("linear") if v.name == "native")
needs_cpu = pytest.mark.skipif(
    not VERSION.available("cpu", BF16), reason="no kernels for AVX512_BF16 here"
)


def bf16(*shape: int, seed: int = 0) -> torch.Tensor:
    return randn(*shape, seed=seed).to(BF16)


def operand(epilogue: str, rows: int, outputs: int) -> torch.Tensor | None:
    return bf16(rows, outputs, seed=5) if epilogue == "add" else None


@needs_cpu
@pytest.mark.parametrize("bias", (False, True))
@pytest.mark.parametrize("epilogue", EPILOGUES)
@pytest.mark.parametrize("inputs", (1, 2, 63, 576))
@pytest.mark.parametrize("outputs", (2, 30, 32, 34, 146))
def test_any_number_of_outputs_and_inputs(outputs, inputs, epilogue, bias):
    """Rows are followed by NaN, which reading past their end would bring in."""
    rows = 17
    x = torch.full((rows * inputs + 64,), float("nan"), dtype=BF16)
    x[: rows * inputs] = bf16(rows * inputs)
    x = x[: rows * inputs].view(rows, inputs)
    weights = [bf16(outputs // 2, inputs, seed=seed) / inputs**0.5 for seed in (1, 2)]
    shift = bf16(outputs, seed=3) if bias else None
    other = operand(epilogue, rows, outputs)
    expected = expected_linear(weights, shift, epilogue, x, other)
    found = NativeLinear(weights, shift, epilogue)(x, other)
    assert found.dtype == (torch.float32 if epilogue == "logits" else BF16)
    assert found.shape == expected.shape
    assert_close(found, expected, VERSION, found.dtype)


@needs_cpu
@pytest.mark.parametrize("epilogue", EPILOGUES)
@pytest.mark.parametrize("outputs", (96, 130))
@pytest.mark.parametrize("rows", (*range(17), 28, 29, 130, 196, 197, 500))
def test_any_number_of_rows(rows, outputs, epilogue):
    x, other = bf16(rows, 96), operand(epilogue, rows, outputs)
    weight, shift = bf16(outputs, 96, seed=1) / 10, bf16(outputs, seed=2)
    expected = expected_linear([weight], shift, epilogue, x, other)
    found = NativeLinear([weight], shift, epilogue)(x, other)
    assert found.shape == expected.shape
    if rows:
        assert_close(found, expected, VERSION, found.dtype)


@needs_cpu
@pytest.mark.parametrize("threads", (1, 2, 3))
@pytest.mark.parametrize("epilogue", EPILOGUES)
@pytest.mark.parametrize(("outputs", "inputs"), ((146, 577), (576, 1536)))
def test_a_rows_bits_depend_neither_on_the_batch_nor_on_the_threads(
    outputs, inputs, epilogue, threads
):
    x, other = bf16(450, inputs), operand(epilogue, 450, outputs)
    linear = NativeLinear(
        [bf16(outputs, inputs, seed=1) / inputs**0.5], bf16(outputs, seed=2), epilogue
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


@needs_cpu
@pytest.mark.parametrize("rows", (1, 6, 7, 31))
def test_rows_a_multiple_of_2_kib_apart(rows):
    """Their inputs are copied."""
    x, weight = bf16(40, 2048), bf16(70, 2048, seed=1) / 45
    linear = NativeLinear([weight], None, "none")
    found = linear(x[:rows])
    assert_close(found, expected_linear([weight], None, "none", x[:rows]), VERSION, BF16)
    assert torch.equal(found, linear(x)[:rows])


@needs_cpu
def test_logits_are_summed_up_and_kept_in_fp32():
    x, weight = bf16(9, 576) * 8, bf16(500, 576, seed=1)
    found = NativeLinear([weight], None, "logits")(x)
    exact = expected_linear([weight], None, "none", x)
    assert ((found - exact).abs().max() / exact.abs().max()) < 1e-6
    assert (found != found.to(BF16)).float().mean() > 0.9


@needs_cpu
def test_projections_of_any_size_are_fused():
    x = bf16(5, 64)
    weights = [bf16(size, 64, seed=size) for size in (40, 7, 1, 33)]
    expected = expected_linear(weights, None, "none", x)
    assert_close(NativeLinear(weights, None, "none")(x), expected, VERSION, BF16)


@needs_cpu
def test_tensors_that_are_not_contiguous():
    x, other, weight = bf16(64, 6).T, bf16(40, 6, seed=1).T, bf16(64, 40, seed=2).T
    expected = expected_linear([weight], None, "add", x, other)
    assert_close(NativeLinear([weight], None, "add")(x, other), expected, VERSION, BF16)


@needs_cpu
def test_the_sum_is_written_over_the_operand():
    linear, other = NativeLinear([bf16(40, 64)], None, "add"), bf16(3, 40)
    assert linear(bf16(3, 64), other).data_ptr() == other.data_ptr()


@needs_cpu
def test_the_operand_may_be_x():
    x, weight = bf16(20, 64), bf16(64, 64, seed=1)
    expected = expected_linear([weight], None, "add", x, x)
    assert_close(NativeLinear([weight], None, "add")(x, x), expected, VERSION, BF16)


@needs_cpu
def test_weights_are_copied():
    weight, x = bf16(40, 64), bf16(3, 64)
    linear = NativeLinear([weight], None, "none")
    before = linear(x)
    weight.zero_()
    assert torch.equal(linear(x), before)


@needs_cpu
def test_silu_of_large_numbers():
    values = (-1e30, -200.0, -80.0, -1.0, 0.0, 1.0, 80.0, 200.0, 1e30, float("inf"))
    x = torch.tensor(values).to(BF16)[:, None]
    ones = torch.ones(1, 1, dtype=BF16)
    linear = NativeLinear([ones, torch.zeros_like(ones)], torch.tensor([0.0, 1.0]), "silu_mul")
    expected = torch.nn.functional.silu(x.double())
    finite = slice(None, -1)
    torch.testing.assert_close(linear(x)[finite].double(), expected[finite], rtol=4e-3, atol=1e-30)


@needs_cpu
def test_nan_stays_in_its_row():
    x = bf16(20, 64)
    linear = NativeLinear([bf16(64, 64, seed=1)], None, "silu_mul")
    before = linear(x)
    x[7, 3] = float("nan")
    found = linear(x)
    assert found[7].isnan().all()
    found[7] = before[7]
    assert torch.equal(found, before)


@needs_cpu
def test_operands_that_do_not_fit_are_refused():
    weight = bf16(40, 64)
    with pytest.raises(ValueError, match="BF16"):
        NativeLinear([weight.float()], None, "none")
    with pytest.raises(ValueError, match="64"):
        NativeLinear([weight], None, "none")(bf16(3, 65))
    with pytest.raises(ValueError, match="BF16"):
        NativeLinear([weight], None, "none")(bf16(3, 64).float())
    with pytest.raises(ValueError, match="operand"):
        NativeLinear([weight], None, "none")(bf16(3, 64), bf16(3, 40))
    for other in (None, bf16(2, 40), bf16(3, 40).float()):
        with pytest.raises(ValueError, match="operand"):
            NativeLinear([weight], None, "add")(bf16(3, 64), other)


def test_only_where_the_cpu_has_the_instruction_and_no_amx(monkeypatch):
    monkeypatch.setattr(module, "features", lambda: Features.AVX512_BF16)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    assert module.available("cpu", BF16)
    assert not module.available("cpu", torch.float32) and not module.available("cuda", BF16)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    assert not module.available("cpu", BF16)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    monkeypatch.setattr(module, "features", lambda: Features.AVX2 | Features.AVX512)
    assert not module.available("cpu", BF16)


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
