"""llm-compressor's checkpoints: its ways to store weights, and which modules its groups name."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from octavo.quant.compressed_tensors import config
from octavo.quant.compressed_weights import Int8Stored, Packed
from octavo.quant.fp8 import FP8
from octavo.quant.scheme import read_scheme
from octavo.types import ConfigError
from tests.quant import slow_readers
from tests.quant.stored import declared, decoded, equal, numbers, vectors, words

NAME = "compressed-tensors"
UP = "model.layers.0.mlp.up_proj"
WEIGHTS = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128}
GROUP = {"targets": ["Linear"], "weights": WEIGHTS}
PACKED = {"quant_method": NAME, "format": "pack-quantized", "config_groups": {"group_0": GROUP}}


def packed_tensors(format: Packed, outputs: int, inputs: int, act_order: bool = False) -> dict:
    rng = np.random.default_rng(0)
    groups = inputs // (format.group or inputs)
    count = -(-inputs * format.bits // 32)
    tensors = {
        "weight_packed": words(rng, outputs, count),
        "weight_scale": numbers(rng, outputs, groups),
        "weight_shape": torch.tensor([outputs, inputs]),
    }
    if not format.symmetric:
        tensors["weight_zero_point"] = words(rng, -(-outputs * format.bits // 32), groups)
    if act_order:
        tensors["weight_g_idx"] = torch.from_numpy(rng.permutation(inputs) // format.group).int()
    return tensors


@pytest.mark.parametrize("bits", (4, 8))
@pytest.mark.parametrize("symmetric", (True, False))
@pytest.mark.parametrize(
    ("group", "outputs", "inputs", "act_order"),
    ((32, 16, 96, False), (128, 12, 128, False), (0, 5, 36, False), (32, 16, 96, True)),
)
def test_packed_weights(
    bits: int, symmetric: bool, group: int, outputs: int, inputs: int, act_order: bool
) -> None:
    format = Packed(bits, group, symmetric)
    format.check(outputs, inputs)
    tensors = packed_tensors(format, outputs, inputs, act_order)
    declared(format, tensors, outputs, inputs)
    weight = format.read(tensors, outputs, inputs)
    assert (weight.order is not None) == act_order
    arrays = {name: tensor.numpy() for name, tensor in tensors.items()}
    slow = slow_readers.pack_quantized(
        arrays["weight_packed"],
        arrays["weight_scale"],
        arrays.get("weight_zero_point"),
        arrays.get("weight_g_idx"),
        bits,
        inputs,
    )
    equal(weight.dense(), slow)
    written = format.write(weight)
    declared(format, written, outputs, inputs)
    again = format.read(written, outputs, inputs)
    equal(again.dense(), slow)
    if outputs * bits % 32 == inputs * bits % 32 == 0:
        assert set(written) == set(tensors)
        assert all(torch.equal(written[name], tensor) for name, tensor in tensors.items())


VECTORS = vectors("compressed_tensors")


@pytest.mark.parametrize(
    ("layout", "case"),
    [
        (layout, case)
        for layout in ("pack-quantized", "naive-quantized")
        for case in VECTORS[layout]
    ],
)
def test_weights_mean_what_their_own_package_says(layout: str, case: dict) -> None:
    """And are written as it writes them, but that its scales are in FP32."""
    group = {"targets": ["Linear"], "weights": case["weights"]}
    scheme = scheme_of(format=layout, config_groups={"group_0": group})
    format, dense = scheme.format_of(UP), decoded(case["dense"])
    tensors = {name: decoded(stored) for name, stored in case["tensors"].items()}
    declared(format, tensors, *dense.shape)
    weight = format.read(tensors, *dense.shape)
    equal(weight.dense(), dense.numpy())
    written = format.write(weight)
    assert set(written) == set(tensors)
    for name, tensor in tensors.items():
        assert torch.equal(written[name].float(), tensor.float()), name


def test_a_word_packed_by_hand() -> None:
    """Codes -8 .. -1 stand as 0 .. 7; the zero -7 as 1."""
    tensors = {
        "weight_packed": torch.tensor([[0x76543210]], dtype=torch.int32),
        "weight_scale": torch.tensor([[0.5]], dtype=torch.float16),
        "weight_zero_point": torch.tensor([[1]], dtype=torch.int32),
    }
    weight = Packed(4, 0, False).read(tensors, 1, 8)
    assert weight.dense()[0].tolist() == [-0.5, 0, 0.5, 1, 1.5, 2, 2.5, 3]
    weight = Packed(4, 0).read(tensors, 1, 8)
    assert weight.dense()[0].tolist() == [-4, -3.5, -3, -2.5, -2, -1.5, -1, -0.5]


def test_an_order_of_inputs_that_is_not_there() -> None:
    tensors = packed_tensors(Packed(4, 32), 16, 64)
    tensors["weight_g_idx"] = torch.full((64,), -1, dtype=torch.int32)
    assert Packed(4, 32).read(tensors, 16, 64).order is None


def test_another_shape_than_the_configs_is_refused() -> None:
    tensors = packed_tensors(Packed(4, 32), 16, 64)
    tensors["weight_shape"] = torch.tensor([16, 60])
    with pytest.raises(ValueError, match=r"weight_shape is \[16, 60\], not \[16, 64\]"):
        Packed(4, 32).read(tensors, 16, 64)


@pytest.mark.parametrize("symmetric", (True, False))
@pytest.mark.parametrize(
    ("group", "shape"), ((0, (1,)), (0, (12,)), (0, (12, 1)), (32, (12, 2)), (0, (3,)))
)
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16))
def test_weights_of_int8(symmetric: bool, group: int, shape: tuple, dtype: torch.dtype) -> None:
    rng, outputs, inputs = np.random.default_rng(0), 12, 64
    format, parts = Int8Stored(group, symmetric), (6, 4, 2)
    weight = rng.integers(-128, 128, (outputs, inputs), dtype=np.int8)
    zeros = rng.integers(-128, 128, shape, dtype=np.int8)
    tensors = {
        "weight": torch.from_numpy(weight),
        "weight_scale": numbers(rng, *shape, dtype=dtype),
        "input_scale": torch.tensor([1.0]),
    }
    if not symmetric:
        tensors["weight_zero_point"] = torch.from_numpy(zeros)

    def spread(values: np.ndarray) -> np.ndarray:
        if values.shape == (3,):
            values = np.repeat(values, parts)
        flat = values.reshape(-1, 2) if group else values.reshape(-1, 1)
        return np.broadcast_to(np.repeat(flat, inputs // flat.shape[1], axis=1), weight.shape)

    declared(format, tensors, outputs, inputs)
    read = format.read(tensors, outputs, inputs, parts if shape == (3,) else ())
    scales = spread(tensors["weight_scale"].float().numpy())
    slow = slow_readers.int_quantized(weight, scales, None if symmetric else spread(zeros))
    equal(read.dense(), slow)
    assert not read.weight_only
    written = format.write(read)
    declared(format, written, outputs, inputs)
    equal(format.read(written, outputs, inputs).dense(), slow)
    assert torch.equal(written["weight"], tensors["weight"])
    with pytest.raises(ValueError, match="weight_scale has 5 numbers for 12 outputs"):
        format.read({**tensors, "weight_scale": torch.ones(5)}, outputs, inputs)


def scheme_of(**changes: Any) -> Any:
    return read_scheme({"quantization_config": {**PACKED, **changes}}, None, "config.json")


def test_targets_names_come_before_classes() -> None:
    groups = {
        "group_0": GROUP,
        "group_1": {"targets": ["re:.*down_proj"], "weights": {**WEIGHTS, "num_bits": 8}},
        "group_2": {"targets": [UP], "weights": {**WEIGHTS, "group_size": 32}},
    }
    scheme = scheme_of(config_groups=groups, ignore=["lm_head", "re:.*layers.9\\."])
    assert scheme.format_of(UP) == Packed(4, 32)
    assert scheme.format_of("model.layers.1.mlp.up_proj") == Packed(4, 128)
    assert scheme.format_of("model.layers.1.mlp.down_proj") == Packed(8, 128)
    assert scheme.format_of("model.layers.9.mlp.down_proj") is None
    assert scheme.format_of("lm_head") is None
    del groups["group_0"]
    assert scheme_of(config_groups=groups).format_of("model.layers.1.mlp.up_proj") is None


FP8_WEIGHTS = {"num_bits": 8, "type": "float", "strategy": "channel"}
DYNAMIC = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}


@pytest.mark.parametrize(
    ("layout", "weights", "inputs", "format"),
    (
        ("float-quantized", FP8_WEIGHTS, DYNAMIC, FP8(name=NAME)),
        ("naive-quantized", FP8_WEIGHTS, DYNAMIC, FP8(name=NAME)),
        ("naive-quantized", FP8_WEIGHTS, None, FP8(weight_only=True, name=NAME)),
        (
            "float-quantized",
            {**FP8_WEIGHTS, "strategy": "tensor"},
            {**DYNAMIC, "strategy": "tensor", "dynamic": False},
            FP8(static=True, name=NAME),
        ),
        (
            "float-quantized",
            {**FP8_WEIGHTS, "strategy": "block", "block_structure": [128, 128]},
            {**DYNAMIC, "strategy": "group", "group_size": 128},
            FP8((128, 128), name=NAME),
        ),
        ("int-quantized", {"num_bits": 8, "strategy": "channel"}, DYNAMIC, Int8Stored()),
        (
            "naive-quantized",
            {"group_size": 64, "symmetric": False},
            None,
            Int8Stored(64, False, True),
        ),
        ("pack-quantized", {"num_bits": 8, "group_size": -1}, None, Packed(8, 0)),
        ("pack-quantized", {**WEIGHTS, "symmetric": False}, None, Packed(4, 128, False)),
    ),
)
@pytest.mark.parametrize("own", (False, True))
def test_ways_to_store_weights(
    layout: str, weights: dict, inputs: dict | None, format: object, own: bool
) -> None:
    """A group names its format itself where formats are mixed."""
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    group |= {"format": layout} if own else {}
    scheme = scheme_of(
        format="mixed-precision" if own else layout, config_groups={"group_0": group}
    )
    assert scheme.format_of(UP) == format


@pytest.mark.parametrize(
    "format",
    (
        Packed(4, 128),
        Packed(8, 0, False),
        Int8Stored(),
        Int8Stored(64, False, weight_only=True),
        FP8(name=NAME),
        FP8((128, 128), name=NAME),
        FP8(static=True, name=NAME),
        FP8(weight_only=True, name=NAME),
    ),
)
def test_its_config_is_read_back(format: Any) -> None:
    values = config(format, ("lm_head", "mlp.gate"))
    scheme = read_scheme({"quantization_config": values}, None, "config.json")
    assert scheme is not None and scheme.format_of(UP) == format
    assert scheme.format_of("lm_head") is None


def test_the_older_key() -> None:
    values = {**PACKED}
    del values["quant_method"]
    scheme = read_scheme({"compression_config": values}, None, "config.json")
    assert scheme is not None and scheme.format_of(UP) == Packed(4, 128)


def test_inputs_that_are_not_rounded_are_told() -> None:
    scheme = scheme_of(config_groups={"group_0": {**GROUP, "input_activations": DYNAMIC}})
    assert list(scheme.notes) == ["input_activations: inputs of weights of 4 bits stay as they are"]


def changed(**weights: Any) -> dict[str, Any]:
    return {"config_groups": {"group_0": {**GROUP, "weights": {**WEIGHTS, **weights}}}}


@pytest.mark.parametrize(
    ("changes", "message"),
    (
        ({"format": "nvfp4-pack-quantized"}, "format is 'nvfp4-pack-quantized'; supported: float-"),
        ({"format": "mxfp4-pack-quantized"}, "format is 'mxfp4-pack-quantized'; supported: float-"),
        ({"format": "marlin-24"}, "format is 'marlin-24'"),
        ({"format": "dense"}, "format is 'dense'"),
        ({"format": "int-quantized"}, r"group_0\.weights\.num_bits is 4; supported: 8"),
        ({"format": "float-quantized"}, "weights.type is 'int'; supported: float, with the format"),
        ({"config_groups": {}}, "config_groups is not there"),
        ({"config_groups": {"group_0": [1]}}, r"group_0 is \[1\]; supported: a JSON object"),
        ({"config_groups": {"group_0": {"weights": WEIGHTS}}}, "group_0.targets is not there"),
        ({"quantization_status": "frozen"}, "quantization_status is 'frozen'; supported: compress"),
        ({"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config.format is 'sparse"),
        ({"transform_config": {"config_groups": {"u": {}}}}, "transform_config is 'rotations"),
        ({"ignore": "lm_head"}, "ignore is 'lm_head'; supported: a list of names"),
        ({"ignore": ["re:("]}, "ignore holds '\\(': no regular expression"),
        (changed(num_bits=3), r"config_groups\.group_0\.weights\.num_bits is 3; supported: 4 or 8"),
        (changed(type="float"), "weights.type is 'float'; supported: int, with the format pack"),
        (changed(strategy="tensor_group"), "strategy is 'tensor_group'; supported: channel or gr"),
        (changed(group_size=30), "group_size is 30; supported: -1 or a multiple of 4"),
        (changed(dynamic=True), "weights.dynamic is True; supported: false"),
        (
            {"config_groups": {"group_0": {**GROUP, "output_activations": {"num_bits": 8}}}},
            "output_activations is {'num_bits': 8}; supported: null",
        ),
    ),
)
def test_what_is_not_supported_is_refused_in_one_line(changes: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=f"^config.json: .*{message}") as caught:
        scheme_of(**changes)
    assert "\n" not in str(caught.value)


def test_weights_it_cannot_hold_are_not_written() -> None:
    weight = Packed(4, 32, False).read(packed_tensors(Packed(4, 32, False), 16, 64), 16, 64)
    with pytest.raises(ValueError, match="a symmetric format has only the zero 8"):
        Packed(4, 32).write(weight)
    with pytest.raises(ValueError, match="only codes of 8 bits"):
        Int8Stored().write(weight)
