"""FP8 checkpoints: types, scales of every kind and of fused projections, static inputs."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from octavo.quant.fp8 import FP8, config
from octavo.quant.scheme import read_scheme
from tests.quant import slow_readers
from tests.quant.stored import declared, equal

OUTPUTS, INPUTS = 24, 40
TYPES = {4: torch.float8_e4m3fn, 5: torch.float8_e5m2}


def random_bytes(outputs: int = OUTPUTS, inputs: int = INPUTS) -> np.ndarray:
    """Of numbers in E4M3 and E5M2: infinities and NaN are refused."""
    stored = np.random.default_rng(0).integers(0, 256, (outputs, inputs), dtype=np.uint8)
    return np.where(stored & 127 < 124, stored, stored & 128)


def random_scales(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(1).uniform(0.01, 2, shape)).to(dtype)


def as_float8(stored: np.ndarray, exponent_bits: int = 4) -> torch.Tensor:
    return torch.from_numpy(stored).view(TYPES[exponent_bits])


@pytest.mark.parametrize("exponent_bits", (4, 5))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize("shape", ((), (1,), (1, 1), (OUTPUTS,), (OUTPUTS, 1)))
def test_scales_of_the_matrix_and_of_outputs(
    exponent_bits: int, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    format, stored, scales = FP8(), random_bytes(), random_scales(*shape, dtype=dtype)
    tensors = {"weight": as_float8(stored, exponent_bits), "weight_scale": scales}
    declared(format, tensors, OUTPUTS, INPUTS)
    weight = format.read(tensors, OUTPUTS, INPUTS)
    assert weight.block == ((1, 0) if scales.numel() > 1 else (0, 0))
    assert weight.input_scale is None and not weight.weight_only
    spread = np.broadcast_to(scales.float().reshape(-1, 1).numpy(), stored.shape)
    equal(weight.dense(), slow_readers.fp8(stored, spread, exponent_bits))


@pytest.mark.parametrize(
    ("outputs", "inputs", "block"),
    ((256, 128, (128, 128)), (200, 150, (128, 128)), (9, 10, (4, 3))),
)
def test_scales_of_blocks_even_cut_ones(outputs: int, inputs: int, block: tuple) -> None:
    format, stored = FP8(block, "weight_scale_inv"), random_bytes(outputs, inputs)
    scales = random_scales(-(-outputs // block[0]), -(-inputs // block[1]))
    tensors = {"weight": as_float8(stored), "weight_scale_inv": scales}
    declared(format, tensors, outputs, inputs)
    spread = slow_readers.block_scales(scales.numpy(), stored.shape, block)
    weight = format.read(tensors, outputs, inputs)
    equal(weight.dense(), slow_readers.fp8(stored, spread, 4))
    written = format.write(weight)
    assert torch.equal(written["weight_scale_inv"], scales)


def test_fused_projections_with_a_scale_each() -> None:
    """Phi-3's qkv_proj: three scales, and three of the input, of which the largest clips none."""
    stored, scales = random_bytes(), torch.tensor([0.5, 2.0, 0.125])
    format = FP8(static=True)
    tensors = {
        "weight": as_float8(stored),
        "weight_scale": scales,
        "input_scale": torch.tensor([0.25, 0.75, 0.5]),
    }
    declared(format, tensors, OUTPUTS, INPUTS)
    weight = format.read(tensors, OUTPUTS, INPUTS, parts=(12, 8, 4))
    rows = np.repeat(scales.numpy(), (12, 8, 4))[:, None]
    equal(weight.dense(), slow_readers.fp8(stored, np.broadcast_to(rows, stored.shape), 4))
    assert weight.input_scale is not None and weight.input_scale.item() == 0.75
    equal(weight[12:20].dense(), slow_readers.fp8(stored[12:20], np.full((8, INPUTS), 2.0), 4))
    with pytest.raises(ValueError, match="weight_scale has 3 numbers, not 1 or 24"):
        format.read(tensors, OUTPUTS, INPUTS)
    with pytest.raises(ValueError, match="input_scale has 3 numbers for 1"):
        format.read({**tensors, "weight_scale": scales[:1]}, OUTPUTS, INPUTS)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    (
        ("weight_scale", torch.tensor(float("nan")), "weight_scale holds numbers that are not"),
        ("input_scale", torch.tensor(float("inf")), "input_scale holds numbers that are not"),
        ("input_scale", torch.tensor(0.0), "input_scale is 0, which divides nothing"),
    ),
)
def test_scales_that_mean_nothing_are_refused(name: str, value: torch.Tensor, message: str) -> None:
    tensors = {
        "weight": as_float8(random_bytes()),
        "weight_scale": torch.tensor(1.0),
        "input_scale": torch.tensor(1.0),
    }
    with pytest.raises(ValueError, match=message):
        FP8(static=True).read(tensors | {name: value}, OUTPUTS, INPUTS)


@pytest.mark.parametrize(
    ("format", "scales"),
    (
        (FP8(static=True), random_scales(1)),
        (FP8(), random_scales(OUTPUTS, 1)),
        (FP8((16, 8), "weight_scale_inv"), random_scales(2, 5)),
    ),
)
def test_what_is_written_is_read_the_same(format: FP8, scales: torch.Tensor) -> None:
    tensors = {"weight": as_float8(random_bytes()), format.scale: scales}
    if format.static:
        tensors["input_scale"] = torch.tensor([0.5])
    written = format.write(format.read(tensors, OUTPUTS, INPUTS))
    declared(format, written, OUTPUTS, INPUTS)
    assert set(written) == set(tensors)
    for name, tensor in tensors.items():
        assert written[name].dtype == tensor.dtype
        assert written[name].shape == tensor.shape
        assert torch.equal(written[name].float().nan_to_num(), tensor.float().nan_to_num()), name
    scheme = read_scheme({"quantization_config": config(format)}, None, "config.json")
    assert scheme is not None
    assert scheme.format_of("model.layers.0.mlp.up_proj") == format
    assert scheme.format_of("lm_head") is None


def test_weights_it_cannot_hold_are_not_written() -> None:
    tensors = {"weight": as_float8(random_bytes()), "weight_scale": torch.tensor(1.0)}
    weight = FP8().read(tensors, OUTPUTS, INPUTS)
    with pytest.raises(ValueError, match=r"scales of blocks \(0, 0\), not \(128, 128\)"):
        FP8((128, 128)).write(weight)
    with pytest.raises(ValueError, match="a static scheme needs a scale of the inputs"):
        FP8(static=True).write(weight)


@pytest.mark.parametrize(("exponent_bits", "byte"), ((4, 0x7F), (4, 0xFF), (5, 0x7C), (5, 0xFE)))
def test_weights_that_are_no_numbers_are_refused(exponent_bits: int, byte: int) -> None:
    stored = random_bytes()
    tensors = {"weight": as_float8(stored, exponent_bits), "weight_scale": torch.tensor(1.0)}
    FP8().read(tensors, OUTPUTS, INPUTS)
    stored[1, 2] = byte
    with pytest.raises(ValueError, match="weight holds 1 numbers that are not finite"):
        FP8().read(tensors, OUTPUTS, INPUTS)


def test_an_input_scale_of_no_number_is_refused() -> None:
    tensors = {"weight": as_float8(random_bytes()), "weight_scale": torch.tensor(1.0)}
    with pytest.raises(ValueError, match="input_scale has 0 numbers for 1"):
        FP8(static=True).read({**tensors, "input_scale": torch.zeros(0)}, OUTPUTS, INPUTS)
