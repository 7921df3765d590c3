"""GPTQ checkpoints: every layout is read bit for bit, and what contradicts itself is settled."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from octavo.quant.gptq import GPTQ, config
from octavo.quant.packing import pack, unpack
from octavo.quant.scheme import read_scheme
from tests.quant import slow_readers
from tests.quant.stored import declared, equal, numbers, words


def random_tensors(format: GPTQ, outputs: int, inputs: int, seed: int = 0) -> dict:
    rng = np.random.default_rng(seed)
    groups = inputs // (format.group or inputs)
    return {
        "qweight": words(rng, inputs * format.bits // 32, outputs),
        "qzeros": words(rng, groups, outputs * format.bits // 32),
        "scales": numbers(rng, groups, outputs),
    }


def slow(format: GPTQ, tensors: dict) -> np.ndarray:
    arrays = {name: tensor.numpy() for name, tensor in tensors.items()}
    return slow_readers.gptq(
        arrays["qweight"],
        arrays["qzeros"],
        arrays["scales"],
        arrays.get("g_idx"),
        format.bits,
        format.version == "gptq_v2",
    )


@pytest.mark.parametrize("act_order", (None, "straight", "shuffled"))
@pytest.mark.parametrize("version", ("gptq", "gptq_v2"))
@pytest.mark.parametrize(("group", "inputs"), ((32, 96), (128, 128), (0, 96), (20, 160)))
@pytest.mark.parametrize("bits", (2, 3, 4, 8))
def test_reads_what_is_stored(
    bits: int, group: int, inputs: int, version: str, act_order: str | None
) -> None:
    format, outputs = GPTQ(bits, group, False, version), 32
    format.check(outputs, inputs)
    tensors = random_tensors(format, outputs, inputs)
    if act_order:
        order = np.arange(inputs)
        if act_order == "shuffled":
            order = np.random.default_rng(1).permutation(inputs)
        tensors["g_idx"] = torch.from_numpy(order // (group or inputs)).int()
    declared(format, tensors, outputs, inputs)
    weight = format.read(tensors, outputs, inputs)
    assert (weight.order is not None) == (act_order == "shuffled" and group not in (0, inputs))
    equal(weight.dense(), slow(format, tensors))


def test_a_code_of_three_bits_crosses_words() -> None:
    # Codes 10 and 21 of 32 lie in two words: 0b101 as 01 at bit 30 and 1 at bit 0 of the next,
    # 0b110 as 0 at bit 31 and 11 at bits 0 and 1.
    stream = torch.tensor([[0b01 << 30, 1, 0b11]], dtype=torch.int64)
    stored = torch.where(stream >= 1 << 31, stream - (1 << 32), stream).int()
    codes = unpack(stored, 3, 32)[0].tolist()
    assert codes == [0] * 10 + [5] + [0] * 10 + [6] + [0] * 10
    assert torch.equal(pack(unpack(stored, 3, 32), 3), stored)


def test_a_vector_packed_by_hand() -> None:
    """Eight inputs of one output: codes 0 .. 7, zero 3 (2 in v1), scale 0.5."""
    word = torch.tensor([[0x76543210]], dtype=torch.int32).expand(1, 8)
    zeros = torch.tensor([[0x22222222]], dtype=torch.int32)
    scales = torch.full((1, 8), 0.5, dtype=torch.float16)
    tensors = {"qweight": word, "qzeros": zeros, "scales": scales}
    weight = GPTQ(4, 0).read(tensors, 8, 8)
    assert (weight.zero, weight.zeros) == (3, None)
    assert weight.dense()[5].tolist() == [-1.5, -1, -0.5, 0, 0.5, 1, 1.5, 2]


@pytest.mark.parametrize("bits", (2, 3, 4, 8))
@pytest.mark.parametrize("field", ("gptq", "gptq_v2", None))
@pytest.mark.parametrize("written", ("gptq", "gptq_v2"))
@pytest.mark.parametrize("sym", (True, None))
def test_a_symmetric_checkpoint_means_the_same_whatever_its_version_field(
    bits: int, field: str | None, written: str, sym: bool | None
) -> None:
    """Stored zeros 7 and 8 of 4 bits, by a field that is right, wrong or absent."""
    values = {"quant_method": "gptq", "bits": bits, "group_size": 32, "sym": sym}
    scheme = read_scheme(
        {"quantization_config": values | {"checkpoint_format": field}}, None, "config.json"
    )
    assert scheme is not None
    format = scheme.format_of("model.layers.0.mlp.up_proj")
    assert isinstance(format, GPTQ)
    tensors = random_tensors(format, 32, 64)
    middle = 1 << (bits - 1)
    stored = torch.full((2, 32), middle - (written == "gptq"), dtype=torch.uint8)
    tensors["qzeros"] = pack(stored, bits)
    weight = format.read(tensors, 32, 64)
    assert (weight.zero, weight.zeros) == (middle, None)
    equal(weight.dense(), slow(replace(format, version=written), tensors))
    assert bool(scheme.notes) == (written != (field or "gptq"))
    if scheme.notes:
        (note,) = scheme.notes
        assert f"stored as {middle - (written == 'gptq')}" in note


@pytest.mark.parametrize("version", ("gptq", "gptq_v2"))
def test_equal_zeros_of_a_checkpoint_that_is_not_symmetric_follow_its_field(version: str) -> None:
    format = GPTQ(4, 32, False, version)
    tensors = random_tensors(format, 32, 64)
    tensors["qzeros"] = torch.full_like(tensors["qzeros"], 0x77777777)
    weight = format.read(tensors, 32, 64)
    assert (weight.zero, weight.zeros) == (8 if version == "gptq" else 7, None)
    assert not format.notes


@pytest.mark.parametrize("bits", (2, 4, 8))
def test_zeros_of_nought_in_v1_borrow_from_the_next(bits: int) -> None:
    """As GPTQModel writes them: the words of v2 minus one in every place."""
    format = GPTQ(bits, 32, False)
    tensors = random_tensors(format, 32, 64)
    zeros = torch.from_numpy(np.random.default_rng(3).integers(0, 1 << bits, (32, 2))).byte()
    zeros[1::3] = 0
    ones = sum(1 << bits * place for place in range(32 // bits))
    tensors["qzeros"] = pack(zeros.T, bits) - ones
    found = format.read(tensors, 32, 64).zeros
    assert found is not None and torch.equal(found, zeros)


def test_groups_of_other_sizes_than_told_are_refused() -> None:
    format = GPTQ(4, 32)
    tensors = random_tensors(format, 32, 64)
    g_idx = torch.arange(64, dtype=torch.int32) // 32
    for place, value, message in (
        (0, 1, "g_idx gives group 0 31 inputs, not 32"),
        (0, 2, "g_idx holds 2, of groups 0 to 1"),
        (0, -1, "g_idx holds -1, of groups 0 to 1"),
    ):
        wrong = g_idx.clone()
        wrong[place] = value
        with pytest.raises(ValueError, match=message):
            format.read({**tensors, "g_idx": wrong}, 32, 64)


@pytest.mark.parametrize(
    ("format", "outputs", "inputs", "message"),
    (
        (GPTQ(4, 64), 32, 96, "groups of 64 do not divide 96 inputs"),
        (GPTQ(3, 0), 32, 40, "40 inputs of 3 bits do not fill whole words"),
        (GPTQ(4, 32), 12, 64, "12 outputs of 4 bits do not fill whole words"),
        (GPTQ(4, 0), 32, 65_544, "at most 65536, not 65544"),
    ),
)
def test_matrices_it_cannot_hold_are_refused(
    format: GPTQ, outputs: int, inputs: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        format.check(outputs, inputs)


@pytest.mark.parametrize("act_order", (False, True))
@pytest.mark.parametrize("version", ("gptq", "gptq_v2"))
@pytest.mark.parametrize("bits", (2, 3, 4, 8))
def test_what_is_written_is_read_the_same(bits: int, version: str, act_order: bool) -> None:
    format = GPTQ(bits, 32, False, version)
    tensors = random_tensors(format, 32, 96)
    # v1 cannot tell a zero of nought: no stored zero has all bits set.
    stored = unpack(tensors["qzeros"], bits, 32).clamp(max=(1 << bits) - 2)
    tensors["qzeros"] = pack(stored, bits)
    order = np.random.default_rng(2).permutation(96) if act_order else np.arange(96)
    tensors["g_idx"] = torch.from_numpy(order // 32).int()
    written = format.write(format.read(tensors, 32, 96))
    declared(format, written, 32, 96)
    assert set(written) == set(tensors)
    for name, tensor in tensors.items():
        assert torch.equal(written[name], tensor), name
    scheme = read_scheme({"quantization_config": config(format, act_order)}, None, "config.json")
    assert scheme is not None
    assert scheme.format_of("model.layers.0.mlp.up_proj") == format


def test_weights_it_cannot_hold_are_not_written() -> None:
    format = GPTQ(4, 32)
    weight = format.read(random_tensors(format, 32, 64), 32, 64)
    with pytest.raises(ValueError, match="write gptq_v2"):
        format.write(replace(weight, zeros=torch.zeros_like(weight.scales, dtype=torch.uint8)))
    with pytest.raises(ValueError, match="4 bits in groups of 32, not 4 in 64"):
        replace(format, group=64).write(weight)
    with pytest.raises(ValueError, match="FP16 does not hold"):
        format.write(replace(weight, scales=weight.scales.float() * 1.0001))
