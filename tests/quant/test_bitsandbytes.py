"""bitsandbytes' checkpoints: bit for bit as its own CPU functions take them, and a slow reader."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from octavo.ops.weights import TableWeight
from octavo.quant.bitsandbytes import TABLES, EightBit, FourBit, config
from octavo.quant.scheme import read_scheme
from octavo.types import ConfigError
from tests.quant import slow_readers
from tests.quant.stored import declared, decoded, equal, vectors

VECTORS = vectors("bitsandbytes")
UP = "model.layers.0.mlp.up_proj"


@pytest.mark.parametrize("case", VECTORS["four_bit"])
def test_four_bits_mean_what_bitsandbytes_says(case: dict) -> None:
    tensors = {name: decoded(stored) for name, stored in case["tensors"].items()}
    dense, format = decoded(case["dense"]), FourBit(case["kind"])
    assert ("weight.nested_absmax" in tensors) == case["nested"]
    declared(format, tensors, *dense.shape)
    weight = format.read(tensors, *dense.shape)
    equal(weight.dense(), dense.numpy())
    expected = torch.tensor(TABLES[case["kind"]])
    assert torch.equal(weight.table, expected)


def test_eight_bits_mean_what_bitsandbytes_says() -> None:
    """But for the last bit: it multiplies by 1 / 127 last."""
    case = VECTORS["eight_bit"]
    tensors = {name: decoded(stored) for name, stored in case["tensors"].items()}
    dense = decoded(case["dense"])
    declared(EightBit(), tensors, *dense.shape)
    weight = EightBit().read(tensors, *dense.shape)
    torch.testing.assert_close(weight.dense(), dense, rtol=2**-22, atol=0)
    assert torch.equal(weight.codes.int() - 128, tensors["weight"].int())


def random_tensors(kind: str, shape: tuple[int, int], block: int, nested: bool) -> dict:
    rng, count = np.random.default_rng(0), shape[0] * shape[1]
    blocks = -(-count // block)
    state = {"quant_type": kind, "blocksize": block, "dtype": "bfloat16", "shape": list(shape)}
    tensors = {
        "weight": torch.from_numpy(rng.integers(0, 256, (-(-count // 2), 1), dtype=np.uint8)),
        "weight.absmax": torch.from_numpy(rng.uniform(0.01, 1, blocks)).float(),
        "weight.quant_map": torch.from_numpy(rng.normal(size=16)).float(),
    }
    if nested:
        state |= {"nested_blocksize": 4, "nested_dtype": "float32", "nested_offset": 0.3}
        tensors |= {
            "weight.absmax": torch.from_numpy(rng.integers(0, 256, blocks, dtype=np.uint8)),
            "weight.nested_absmax": torch.from_numpy(rng.uniform(0.1, 1, -(-blocks // 4))).float(),
            "weight.nested_quant_map": torch.from_numpy(rng.normal(size=256)).float(),
        }
    text = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
    return tensors | {f"weight.quant_state.bitsandbytes__{kind}": text}


@pytest.mark.parametrize("nested", (False, True))
@pytest.mark.parametrize("kind", ("nf4", "fp4"))
@pytest.mark.parametrize(
    ("shape", "block", "group"),
    (((6, 128), 64, 64), ((5, 96), 64, 32), ((7, 36), 64, 4), ((16, 16), 128, 16), ((3, 7), 64, 1)),
)
def test_blocks_that_end_within_rows(
    shape: tuple[int, int], block: int, group: int, kind: str, nested: bool
) -> None:
    tensors = random_tensors(kind, shape, block, nested)
    format = FourBit(kind)
    declared(format, tensors, *shape)
    weight = format.read(tensors, *shape)
    assert weight.group == group
    arrays = {name: tensor.numpy() for name, tensor in tensors.items()}
    scales = arrays["weight.absmax"]
    if nested:
        outer = (arrays["weight.nested_quant_map"], arrays["weight.nested_absmax"])
        scales = slow_readers.nested_scales(scales, *outer, 4, 0.3)
    stored, table = arrays["weight"][:, 0], arrays["weight.quant_map"]
    equal(weight.dense(), slow_readers.four_bit(stored, table, scales, shape, block))


def test_bytes_stored_as_another_type() -> None:
    tensors = random_tensors("nf4", (4, 64), 64, False)
    dense = FourBit("nf4").read(tensors, 4, 64).dense()
    tensors["weight"] = tensors["weight"].flatten().view(torch.bfloat16)[:, None]
    format = FourBit("nf4", "bfloat16")
    declared(format, tensors, 4, 64)
    equal(format.read(tensors, 4, 64).dense(), dense.numpy())


def without(tensors: dict, name: str) -> dict:
    return {key: tensor for key, tensor in tensors.items() if key != name}


def state(text: str) -> torch.Tensor:
    return torch.tensor(list(text.encode()), dtype=torch.uint8)


def test_what_means_nothing_is_refused() -> None:
    plain, nested = (random_tensors("nf4", (4, 64), 64, nested) for nested in (False, True))
    key = "weight.quant_state.bitsandbytes__nf4"
    other = random_tensors("nf4", (2, 128), 64, False)[key]
    named = torch.tensor(list(b'{"quant_type": "nf4", "shape": [4, 64], "blocksize": 0}'))
    good = {"quant_type": "nf4", "shape": [4, 64], "blocksize": 64}
    huge = json.dumps({**good, "blocksize": 10**30})
    said = json.dumps({**good, "quant_type": "a" * 1000})
    offset = json.dumps({**good, "nested_blocksize": 256, "nested_offset": float("inf")})
    for tensors, message in (
        (plain | {"weight.quant_map": torch.zeros(15)}, "quant_map has 15 numbers, not 16"),
        (plain | {"weight.absmax": torch.ones(5)}, "absmax has 5 numbers for 4 blocks"),
        (plain | {"weight.absmax": torch.full((4,), float("inf"))}, "absmax holds numbers that"),
        (plain | {key: other}, r"says 'nf4' of \[2, 128\], not 'nf4' of \[4, 64\]"),
        (plain | {key: other[:9]}, "cannot be read"),
        (plain | {key: named}, "has a blocksize of 0"),
        (plain | {key: state("[" * 100_000)}, "cannot be read: RecursionError"),
        (plain | {key: state(huge)}, "has a blocksize of 1000000000000"),
        (plain | {key: state(said)}, "says 'aaaaa[^ ]*... of "),
        (plain | {"weight.quant_map": torch.full((16,), float("nan"))}, "quant_map holds numbers"),
        (nested | {key: state(offset)}, "nested_offset is inf, not a finite"),
        (without(nested, "weight.nested_absmax"), "nothing says by which scales"),
        (nested | {"weight.nested_absmax": torch.ones(3)}, "256 and 3 numbers, not 256 and 1"),
    ):
        with pytest.raises(ValueError, match=message):
            FourBit("nf4").read(tensors, 4, 64)
    eight = {"SCB": torch.ones(2), "weight": torch.zeros(2, 4, dtype=torch.int8)}
    with pytest.raises(ValueError, match=r"weight_format is \[2\], a GPU's own order"):
        EightBit().read(eight | {"weight_format": torch.tensor(2, dtype=torch.uint8)}, 2, 4)
    with pytest.raises(ValueError, match="SCB holds numbers that are not finite"):
        EightBit().read(eight | {"SCB": torch.tensor([1, float("nan")])}, 2, 4)


@pytest.mark.parametrize("kind", ("nf4", "fp4"))
@pytest.mark.parametrize("shape", ((6, 128), (5, 96), (3, 7), (2, 16)))
def test_what_is_written_is_read_the_same(kind: str, shape: tuple[int, int]) -> None:
    tensors = random_tensors(kind, shape, 64, False)
    if shape == (3, 7):
        tensors["weight"][-1] &= 240  # half of the last byte is spare
    tensors["weight.quant_map"] = torch.tensor(TABLES[kind])
    format = FourBit(kind)
    written = format.write(format.read(tensors, *shape))
    declared(format, written, *shape)
    assert set(written) == set(tensors)
    assert all(torch.equal(written[name], tensor) for name, tensor in tensors.items())
    scheme = read_scheme({"quantization_config": config(format)}, None, "config.json")
    assert scheme is not None and scheme.format_of(UP) == format
    assert scheme.format_of("lm_head") is None


def test_eight_bits_are_written_and_read_the_same() -> None:
    rng = np.random.default_rng(0)
    tensors = {
        "weight": torch.from_numpy(rng.integers(-127, 128, (500, 8), dtype=np.int8)),
        "SCB": torch.from_numpy(rng.uniform(1e-4, 10, 500)).float(),
        "weight_format": torch.tensor(0, dtype=torch.uint8),
    }
    weight = EightBit().read(tensors, 500, 8)
    written = EightBit().write(weight)
    declared(EightBit(), written, 500, 8)
    assert torch.equal(written["weight"], tensors["weight"])
    assert torch.equal(EightBit().read(written, 500, 8).scales, weight.scales)
    scheme = read_scheme({"quantization_config": config(EightBit())}, None, "config.json")
    assert scheme is not None and scheme.format_of(UP) == EightBit()


def test_weights_it_cannot_hold_are_not_written() -> None:
    table, codes = torch.tensor(TABLES["nf4"]), torch.zeros(4, 96, dtype=torch.uint8)
    weight = TableWeight(codes, table, torch.ones(4, 3), 4, 32)
    with pytest.raises(ValueError, match="only codes of the table of fp4"):
        FourBit("fp4").write(weight)
    with pytest.raises(ValueError, match="groups of 96 inputs, not 32"):
        FourBit("nf4").write(replace(weight, group=96, scales=torch.ones(4, 1)))
    with pytest.raises(ValueError, match="scales that differ within a block of 64"):
        FourBit("nf4").write(replace(weight, scales=torch.arange(12.0).view(4, 3)))


@pytest.mark.parametrize(
    ("values", "message"),
    (
        ({}, "load_in_4bit is False; supported: true, or load_in_8bit"),
        ({"load_in_4bit": True, "load_in_8bit": True}, "one of them"),
        ({"load_in_4bit": True, "bnb_4bit_quant_type": "af4"}, "'af4'; supported: nf4 or fp4"),
        ({"load_in_4bit": True, "bnb_4bit_quant_storage": "int64"}, "'int64'; supported: uint8 or"),
    ),
)
def test_what_is_not_supported_is_refused(values: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_scheme(
            {"quantization_config": {"quant_method": "bitsandbytes", **values}}, None, "config.json"
        )
