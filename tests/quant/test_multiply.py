"""Which operation multiplies which weight: chosen from what the weight is, also for a GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from octavo.ops.quantized import quantize
from octavo.ops.weights import QuantizedWeight
from octavo.quant.multiply import LinearVersions

pytest.importorskip("triton")  # to know what a GPU has


def versions(device: str, rounds_inputs: bool = True) -> LinearVersions:
    return LinearVersions(None, device, torch.bfloat16, rounds_inputs=rounds_inputs)  # type: ignore


def w8a8(group: int = 64) -> QuantizedWeight:
    generator = torch.Generator().manual_seed(0)
    return replace(quantize(torch.randn(16, 64, generator=generator), group), weight_only=False)


def test_a_gpu_rounds_inputs_where_it_multiplies_whole_numbers() -> None:
    gpu, weight = versions("cuda"), w8a8()
    assert gpu.operation_of(weight) == "quantized_linear"
    moved = replace(weight, codes=(weight.codes // 2) + 3, zero=67)
    assert gpu.operation_of(moved) == "quantized_linear"
    assert versions("cuda", rounds_inputs=False).operation_of(weight) == "weight_only_linear"
    assert gpu.operation_of(replace(weight, weight_only=True)) == "weight_only_linear"


@pytest.mark.parametrize(
    "weight",
    [
        w8a8(32),
        replace(w8a8(), zero=0, zeros=torch.arange(16, dtype=torch.uint8)[:, None]),
        replace(w8a8(), zero=0, minimums=torch.ones(16, 1)),
        replace(w8a8(), zero=3),
    ],
    ids=("groups", "zeros", "minimums", "a zero that is too far"),
)
def test_what_a_gpu_does_not_multiply_as_whole_numbers_keeps_its_inputs(
    weight: QuantizedWeight,
) -> None:
    """INT8 products have one scale an output; a CPU's have groups, zeros and minimums."""
    assert versions("cuda").operation_of(weight) == "weight_only_linear"
    assert versions("cpu").operation_of(weight) == "quantized_linear"


def test_a_cpu_rounds_no_inputs_by_one_scale_for_all(one_thread: None) -> None:
    """Of a weight with one group, whose format leaves inputs as they are. W8A8 keeps its own."""
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 16, (32, 512), generator=generator).to(torch.uint8)
    scales = torch.rand(32, 1, generator=generator) / 100 + 0.01
    weight = QuantizedWeight(codes, scales, None, 4, 512, 8)
    x = torch.randn(3, 512, generator=generator)
    x[:, 7] = 60.0  # one large input takes a scale's range for itself
    exact = x @ weight.dense().T
    errors = []
    for weight_only in (True, False):
        chosen = LinearVersions(None, "cpu", torch.float32)  # type: ignore
        apply = chosen.multiplier([replace(weight, weight_only=weight_only)], None, "none")
        assert list(chosen.used) == ["quantized_linear"]
        errors.append(float((apply(x) - exact).pow(2).mean().sqrt() / exact.std()))
    assert errors[0] < 0.5 * errors[1]  # an eighth of the groups has that input
