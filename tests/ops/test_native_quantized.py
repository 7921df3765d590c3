"""The CPU kernels for linears on quantized weights (csrc/linear_quantized.h), each that runs on
this CPU, against the definition in FP64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from octavo.ops import registry
from octavo.ops.joined import alike
from octavo.ops.native import library
from octavo.ops.native import linear as module
from octavo.ops.native.calls import Pool, Tape
from octavo.ops.native.library import Features, features
from octavo.ops.native.linear import NativeQuantizedLinear
from octavo.ops.quantized import quantize, rounded
from octavo.ops.weights import QuantizedWeight
from tests.ops.batch_invariance import assert_rows_alike
from tests.ops.comparing import assert_close, randn
from tests.ops.emulated_tiles import EMULATED_QUANTIZED

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
EPILOGUES = ("none", "add", "silu_mul", "logits")
DEFINITION, *OTHERS = registry.versions("quantized_linear")
VERSION = next(version for version in OTHERS if version.name == "native")
KERNELS = [
    pytest.param((needed, name), id=name.removeprefix("octavo_linear_quantized_"))
    for needed, name in (*module.QUANTIZED, EMULATED_QUANTIZED)
    if needed in features()
]
if not KERNELS:
    pytest.skip("there are no CPU kernels, or this CPU runs none", allow_module_level=True)
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(params=KERNELS)
def kernel(request, monkeypatch):
    """Is the one that runs."""
    use(monkeypatch, request.param)


def use(monkeypatch, kernel: tuple[Features, str]) -> None:
    monkeypatch.setattr(library, "features", lambda: kernel[0])
    monkeypatch.setattr(module, "QUANTIZED", (kernel,))


def weight(
    outputs: int,
    inputs: int,
    bits: int = 4,
    group: int = 32,
    scales: torch.dtype = FP16,
    minimums: bool = False,
    zero: int | None = 0,
    seed: int = 1,
) -> QuantizedWeight:
    """Random codes; numbers of the size that a model's weights have. ``zero`` None: of each group,
    from 1 on, as GPTQ's: 16 with 4 bits."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 1 << bits, (outputs, inputs), generator=generator).to(torch.uint8)
    groups = -(-inputs // group)
    unit = 1 / (1 << bits) / inputs**0.5
    factors = ((1 + randn(outputs, groups, seed=seed).abs()) * unit).to(scales)
    lows = (randn(outputs, groups, seed=seed + 1) / inputs**0.5).to(scales) if minimums else None
    if zero is not None:
        return QuantizedWeight(codes, factors, lows, bits, group, zero)
    zeros = torch.randint(1, min(1 << bits, 255) + 1, factors.shape, generator=generator)
    return QuantizedWeight(codes, factors, None, bits, group, zeros=zeros.to(torch.uint8))


def expected(
    weights: list[QuantizedWeight],
    bias: Tensor | None,
    epilogue: str,
    x: Tensor,
    other: Tensor | None = None,
) -> Tensor:
    """The definition in FP64."""
    wide = [
        replace(
            w,
            scales=w.scales.double(),
            minimums=None if w.minimums is None else w.minimums.double(),
        )
        for w in weights
    ]
    exact = DEFINITION.call(wide, bias, epilogue, torch.float64)
    return exact(x, None if other is None else other.double())


def check(
    weights: list[QuantizedWeight],
    rows: int,
    dtype: torch.dtype,
    epilogue: str = "none",
    bias: bool = False,
) -> None:
    inputs, outputs = weights[0].shape[1], sum(len(w.codes) for w in weights)
    x = randn(rows, inputs).to(dtype)
    shift = randn(outputs, seed=3).to(dtype) if bias else None
    other = randn(rows, outputs, seed=4).to(dtype) if epilogue == "add" else None
    exact = expected(weights, shift, epilogue, x, other)
    found = NativeQuantizedLinear(weights, shift, epilogue, dtype)(x, other)
    assert found.dtype == (FP32 if epilogue == "logits" else dtype)
    assert found.shape == exact.shape
    if rows:
        assert_close(found, exact, VERSION, found.dtype)


KINDS = {  # bits, scales, minimums, zero (None: of each group)
    "2 bits, FP16, minimums": (2, FP16, True, 0),
    "3 bits, FP16, zero": (3, FP16, False, 4),
    "3 bits, FP32, zeros": (3, FP32, False, None),
    "4 bits, FP16, zero": (4, FP16, False, 8),
    "4 bits, FP16, minimums": (4, FP16, True, 0),
    "4 bits, FP32, minimums": (4, FP32, True, 0),
    "4 bits, FP32, both": (4, FP32, True, 8),
    "4 bits, FP16, zeros": (4, FP16, False, None),
    "8 bits, FP16, zero": (8, FP16, False, 128),
    "8 bits, FP16, both": (8, FP16, True, 16),
    "8 bits, FP32, zero": (8, FP32, False, 32),
    "8 bits, FP32, neither": (8, FP32, False, 0),
    "8 bits, FP32, zeros": (8, FP32, False, None),
}


def fitting(group: int, bits: int) -> int:
    """Codes of 2 and 3 bits come in sixteens."""
    return -(-group // 16) * 16 if bits < 4 else group


@pytest.mark.parametrize("group", (4, 16, 32, 64, 128, 580))
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_any_kind_and_number_of_inputs(kernel, kind, group):
    """Also not a multiple of the group, and fewer. 580: one group over all inputs."""
    bits, scales, minimums, zero = kind
    group = fitting(group, bits)
    for inputs in (1, 3, 64, 257, 577):
        some = weight(70, inputs, bits, group, scales, minimums, zero)
        for rows in (5, 35):  # tiles of AMX are for many
            check([some], rows, BF16 if inputs % 2 else FP32)


@pytest.mark.parametrize("bias", (False, True))
@pytest.mark.parametrize("epilogue", EPILOGUES)
@pytest.mark.parametrize("outputs", (2, 30, 32, 34, 66, 146))
def test_any_epilogue_and_number_of_outputs(kernel, outputs, epilogue, bias):
    for index, (bits, scales, minimums, zero) in enumerate(KINDS.values()):
        some = weight(outputs, 72, bits, 32, scales, minimums, zero)
        check([some], 7, (BF16, FP32)[index % 2], epilogue, bias)


@pytest.mark.parametrize("epilogue", ("none", "add", "logits"))
@pytest.mark.parametrize("outputs", (1, 7, 33, 97))
def test_odd_numbers_of_outputs(kernel, outputs, epilogue):
    for bits, zero in ((4, 8), (8, 128)):
        check([weight(outputs, 64, bits, zero=zero)], 3, FP32, epilogue, bias=True)


@pytest.mark.parametrize("dtype", (BF16, FP32))
@pytest.mark.parametrize("epilogue", EPILOGUES)
def test_any_number_of_rows(kernel, epilogue, dtype):
    for rows in (*range(31), 130, 180, 191, 192, 193, 204, 384, 499, 500, 501):
        check([weight(98, 96, 4 + rows % 2 * 4, minimums=True)], rows, dtype, epilogue)


@pytest.mark.parametrize("outputs", (1, 31, 33, 500))
def test_the_largest_logit_is_the_first_of_them(kernel, outputs):
    for bits, dtype in ((4, FP32), (8, BF16)):
        x = randn(40, 96).to(dtype)
        linear = NativeQuantizedLinear([weight(outputs, 96, bits)], None, "logits", dtype)
        for rows in (0, 1, 2, 5, 12, 13, 40):
            assert torch.equal(linear.largest(x[:rows])[1], linear(x[:rows]).argmax(-1))


@pytest.mark.parametrize("epilogue", ("none", "silu_mul"))
def test_projections_of_any_size_are_fused(kernel, epilogue):
    sizes = (40, 40) if epilogue == "silu_mul" else (40, 7, 1, 33)
    for bits, zero in ((4, 8), (8, 128)):
        weights = [weight(size, 64, bits, zero=zero, seed=size + i) for i, size in enumerate(sizes)]
        check(weights, 5, FP32, epilogue, bias=True)


MIXED = {
    "Q4_0 and Q8_0": [weight(40, 96, 4, 32, zero=8), weight(9, 96, 8, 32, zero=128)],
    "Q4_1 and Q8_0": [weight(40, 96, 4, 32, minimums=True), weight(9, 96, 8, 32, zero=128)],
    "Q4_K and Q6_K": [
        weight(32, 288, 4, 32, FP32, True),
        weight(32, 288, 8, 16, FP32, zero=32),
    ],
    "Q5_0 and Q5_1": [
        replace(weight(8, 64, 8, zero=16), codes=weight(8, 64).codes * 2),
        replace(weight(8, 64, 8, minimums=True), codes=weight(8, 64).codes + 16),
    ],
    "FP16 and FP32": [weight(8, 70, 4, 64, FP16, True), weight(33, 70, 4, 32, FP32, True)],
    "minimums and none": [weight(8, 64, zero=8), weight(8, 64, zero=8, minimums=True)],
    "one with both": [weight(40, 64, zero=8, minimums=True)],
    "3 and 4 bits": [weight(40, 64, 3, zero=None), weight(9, 64, 4, zero=None)],
    "zeros and a zero": [weight(40, 64, zero=None), weight(9, 64, zero=8)],
    "zeros of 4 and 8 bits": [weight(40, 64, 8, zero=None), weight(9, 64, zero=None)],
    "zeros and minimums": [weight(40, 64, zero=None), weight(9, 64, minimums=True)],
}


@pytest.mark.parametrize("weights", MIXED.values(), ids=MIXED)
def test_kinds_that_differ_are_fused(kernel, weights):
    """As one kind that expands to the same numbers; the group of the inputs is the smallest."""
    made = alike(weights)
    kinds = {(w.bits, w.group, w.zero, w.scales.dtype, w.minimums is None) for w in made}
    assert len(kinds) == 1
    for one, given in zip(made, weights):
        moved = one.zero - given.zero if one.zero == 128 else 0
        assert torch.equal(one.codes.int(), given.codes.int() + moved)
        torch.testing.assert_close(one.dense(), given.dense(), rtol=1e-6, atol=1e-8)
    x = randn(9, weights[0].shape[1]).float()
    found = NativeQuantizedLinear(weights, None, "none", FP32)(x)
    group = min(w.group for w in weights)
    dense = torch.cat([w.dense() for w in weights]).double()
    assert_close(found, rounded(x, group).double() @ dense.T, VERSION, FP32)


def test_groups_that_do_not_divide_each_other_cannot_be_fused():
    with pytest.raises(ValueError, match="groups of 40 inputs cannot be cut into 32"):
        alike([weight(4, 80, group=32), weight(4, 80, group=40)])


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_rows_are_those_of_the_expanded_weight_exactly(kernel, kind):
    bits, scales, minimums, zero = kind
    ids = torch.tensor([0, 69, 3, 3, 31, 32, 68, 1])
    for group, inputs in ((4, 57), (32, 96), (64, 100), (128, 300)):
        some = weight(70, inputs, bits, fitting(group, bits), scales, minimums, zero)
        dense = some.dense()
        for dtype in (FP32, BF16):
            linear = NativeQuantizedLinear([some], None, "logits", dtype)
            assert torch.equal(linear.rows(ids), dense[ids].to(dtype))
            assert linear.rows(ids[:0]).shape == (0, inputs)


@pytest.mark.parametrize("codes", ("0", "all ones", "alternating"))
@pytest.mark.parametrize(
    ("bits", "zero"), ((2, 0), (3, 4), (4, 0), (4, 8), (8, 0), (8, 128), (8, 255))
)
def test_nothing_saturates(kernel, bits, zero, codes):
    """Codes and inputs at the ends of their ranges: an integer, exact below 2^24."""
    inputs, top = 512, (1 << bits) - 1
    patterns = {
        "0": torch.zeros(34, inputs),
        "all ones": torch.full((34, inputs), top),
        "alternating": torch.arange(34 * inputs).view(34, inputs) % 2 * top,
    }
    some = QuantizedWeight(
        patterns[codes].to(torch.uint8), torch.ones(34, 1), None, bits, inputs, zero
    )
    x = torch.full((14, inputs), 127.0)
    x[1::2] = -127
    x[2::3, ::2] *= -1
    exact = x.double() @ (some.codes.double() - zero).T
    found = NativeQuantizedLinear([some], None, "none", FP32)(x)
    assert exact.abs().max() < 1 << 24
    assert torch.equal(found.double(), exact)


def test_inputs_are_rounded_to_the_nearest_and_ties_to_even(kernel):
    x = torch.tensor([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 0.499]])
    kept = torch.tensor([127.0, 0, 2, 2, 0, -2, -2, 0])
    identity = QuantizedWeight(torch.eye(8).to(torch.uint8), torch.ones(8, 1), None, 4, 8)
    assert torch.equal(NativeQuantizedLinear([identity], None, "none", FP32)(x)[0], kept)
    assert torch.equal(rounded(x, 8)[0], kept)


@pytest.mark.parametrize("size", (0.0, 1e-45, 1e-38, 3e-37, 4e-37, 1e-30, 1e30, 3e38))
def test_inputs_of_any_size(kernel, size):
    """Those without a finite 127 / max |x| count as 0."""
    x = (torch.arange(-32, 32) / 32 * size)[None].float()
    some = weight(40, 64, zero=8)
    found = NativeQuantizedLinear([some], None, "none", FP32)(x)
    exact = expected([some], None, "none", x)
    assert exact.isfinite().all() and found.isfinite().all()
    assert exact.any() == (size >= 4e-37)
    torch.testing.assert_close(found.double(), exact, rtol=1e-3, atol=1e-5 * size)


@pytest.mark.parametrize("number", (float("nan"), float("inf"), float("-inf")))
@pytest.mark.parametrize("epilogue", EPILOGUES)
def test_what_is_no_number_stays_in_its_row(kernel, epilogue, number):
    x = randn(40, 100).float()
    other = randn(40, 64, seed=4).float() if epilogue == "add" else None
    linear = NativeQuantizedLinear([weight(64, 100, minimums=True)], None, epilogue, FP32)
    before = linear(x, None if other is None else other.clone())
    assert before.isfinite().all()
    x[7, 3] = number
    found = linear(x, other)
    assert not found[7].isfinite().any() or epilogue == "silu_mul"
    if number != number:
        assert found[7].isnan().all()
    found[7] = before[7]
    assert torch.equal(found, before)


def ordered(some: QuantizedWeight, seed: int = 3) -> QuantizedWeight:
    generator = torch.Generator().manual_seed(seed)
    return replace(some, order=torch.randperm(some.shape[1], generator=generator))


@pytest.mark.parametrize("group", (32, 64, 580))
@pytest.mark.parametrize("kind", ("4 bits, FP16, zeros", "8 bits, FP16, zero"))
def test_inputs_in_another_order(kernel, kind, group):
    """They are rounded in the groups that they are sorted into."""
    bits, scales, minimums, zero = KINDS[kind]
    ids = torch.tensor([0, 69, 3, 31])
    for inputs in (3, 96, 577):
        some = ordered(weight(70, inputs, bits, group, scales, minimums, zero))
        for rows in (1, 5, 35):
            for epilogue in ("none", "add", "silu_mul"):
                check([some], rows, BF16 if inputs % 2 else FP32, epilogue)
        linear = NativeQuantizedLinear([some], None, "none", FP32)
        assert torch.equal(linear.rows(ids), some.dense()[ids])


def test_inputs_in_another_order_on_a_tape(kernel):
    some = ordered(weight(70, 96, 4, 32, zero=None))
    linear = NativeQuantizedLinear([some], None, "none", FP32)
    tape, x = Tape((40,), Pool()), torch.zeros(40, 96)
    with tape.recording():
        found = linear(x)
    for rows in (40, 1, 30):
        x[:rows] = randn(rows, 96, seed=rows)
        tape.run(rows)
        assert torch.equal(found[:rows], linear(x[:rows]))


def test_weights_whose_inputs_have_different_orders_cannot_be_fused():
    both = [ordered(weight(8, 64), seed) for seed in (1, 2)]
    with pytest.raises(ValueError, match="different orders"):
        NativeQuantizedLinear(both, None, "none", FP32)


def test_small_codes_in_groups_that_are_no_sixteens_are_refused():
    for bits in (2, 3):
        with pytest.raises(ValueError, match=f"codes of {bits} bits in groups of 40 inputs"):
            NativeQuantizedLinear([weight(8, 80, bits, 40)], None, "none", FP32)


def test_packed_weights_are_as_small_as_their_codes():
    """Beside them 128 inputs have a scale in FP16 and a zero of a byte."""
    for bits in (2, 3, 4, 8):
        some = weight(64, 1024, bits, 128, zero=None)
        linear = NativeQuantizedLinear([some], None, "none", FP32)
        assert 8 * len(linear._panels) / (64 * 1024) == bits + 24 / 128


CASES = [(4, FP16, True, 0), (8, FP16, False, 128), (4, FP16, False, None)]


@pytest.mark.parametrize("threads", (2, 3))
@pytest.mark.parametrize("epilogue", EPILOGUES)
@pytest.mark.parametrize(("outputs", "inputs"), ((146, 577), (320, 768)))
def test_a_rows_bits_depend_neither_on_the_batch_nor_on_the_threads(
    kernel, outputs, inputs, epilogue, threads
):
    kind = CASES[(outputs + len(epilogue)) % len(CASES)]
    x = randn(450, inputs).to(BF16)
    other = randn(450, outputs, seed=5).to(BF16) if epilogue == "add" else None
    some = weight(outputs, inputs, kind[0], 32, *kind[1:])
    linear = NativeQuantizedLinear([some], randn(outputs, seed=2), epilogue, BF16)
    whole = linear(x, None if other is None else other.clone())
    torch.set_num_threads(threads)
    assert torch.equal(linear(x, None if other is None else other.clone()), whole)
    parts = [(n, (37 * n) % (450 - n)) for n in (*range(1, 18), 28, 43, 128, 193, 333)]
    assert_rows_alike(linear, x, other, parts)


@pytest.mark.skipif(len(KERNELS) < 2, reason="this CPU runs one kernel")
@pytest.mark.parametrize("epilogue", ("none", "add", "logits"))
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_all_kernels_give_the_same_bits(monkeypatch, kind, epilogue):
    bits, scales, minimums, zero = kind
    for dtype in (FP32, BF16):
        x = randn(29, 200).to(dtype)
        results = []
        for parameter in KERNELS:
            use(monkeypatch, parameter.values[0])
            some = weight(77, 200, bits, 32, scales, minimums, zero)
            linear = NativeQuantizedLinear([some], randn(77, seed=2), epilogue, dtype)
            other = randn(29, 77, seed=4).to(dtype) if epilogue == "add" else None
            results.append(linear(x, other))
        assert all(torch.equal(found, results[0]) for found in results[1:])


def test_weights_are_copied_and_tensors_need_not_be_contiguous(kernel):
    some = weight(40, 64, minimums=True)
    turned = QuantizedWeight(
        some.codes.T.contiguous().T, some.scales.T.contiguous().T, some.minimums, 4, 32
    )
    x = randn(64, 6).float().T
    linear = NativeQuantizedLinear([turned], None, "none", FP32)
    before = linear(x)
    assert_close(before, expected([some], None, "none", x), VERSION, FP32)
    for tensor in (turned.codes, turned.scales, turned.minimums):
        tensor.zero_()
    assert torch.equal(linear(x), before)


def test_some_rows_of_a_weight():
    some = weight(9, 70, minimums=True)
    for index in (slice(2, 5), torch.tensor([8, 0, 8])):
        assert torch.equal(some[index].dense(), some.dense()[index])


@pytest.mark.parametrize("group", (16, 64, 76))
@pytest.mark.parametrize("dtype", (FP32, BF16))
def test_weights_are_rounded_to_the_nearest_of_255_numbers(dtype, group):
    dense = randn(30, 75).to(dtype)
    dense[4] = 0
    made = quantize(dense, group)
    assert (made.bits, made.zero, made.group, made.minimums) == (8, 128, group, None)
    assert int(made.codes.min()) >= 1  # -127 .. 127
    step = made.scales.repeat_interleave(group, dim=1)[:, :75]
    assert ((made.dense() - dense.float()).abs() <= step * 0.5001).all()
    largest = torch.nn.functional.pad(dense.float(), (0, -75 % group)).view(30, -1, group)
    assert torch.equal(largest.abs().amax(-1) / 127, made.scales)
    assert not made.dense()[4].any()
    if VERSION.available("cpu", dtype):
        native = module.quantize(dense, group)
        assert torch.equal(native.codes, made.codes) and torch.equal(native.scales, made.scales)


def test_only_where_a_kernel_runs(monkeypatch):
    for found, name in (
        (~Features(0), "octavo_linear_quantized_amx"),
        (~Features.AMX, "octavo_linear_quantized_avx512vnni"),
        (Features.AVX2 | Features.AVX512, "octavo_linear_quantized_avx2"),
        (Features(0), None),
    ):
        monkeypatch.setattr(library, "features", lambda found=found: found)
        assert library.preferred(module.QUANTIZED) == name
        for dtype in (FP32, BF16):
            assert VERSION.available("cpu", dtype) == (name is not None)
        assert not VERSION.available("cpu", FP16) and not VERSION.available("cuda", BF16)
