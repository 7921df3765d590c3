"""A model from GGUF files of several types against transformers on the dequantized weights.

Near, at a hundred and at two thousand tokens, where a wrong rotary order would tell. The ``gguf``
package quantizes what it can; K types are packed and unpacked here, by their definition in
ggml-common.h.
"""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from octavo.ops.native import library
from tests.fixtures.gguf_files import add_geometry, gguf_name, to_gguf_rows
from tests.model.running import all_logits, load, random_ids, reference_logits, write_checkpoint

IDS = random_ids(2001)
POSITIONS = [1, 100, 2000]
SHAPE = {"hidden_size": 256, "intermediate_size": 512, "max_position_embeddings": 4096}
BLOCK = 256


def halves(rng: np.random.Generator, count: int, scale: float) -> np.ndarray:
    """count FP16 numbers around ``scale``, as bytes [count, 2]."""
    values = (scale * (0.5 + rng.random((count, 1)))).astype("<f2")
    return values.view(np.uint8)


def random_q4_k(rng: np.random.Generator, count: int) -> np.ndarray:
    """Blocks of d, dmin, 12 bytes of scales and minima, 128 of codes: uint8 [count, 144]."""
    rest = rng.integers(0, 256, (count, 140), dtype=np.uint8)
    return np.hstack([halves(rng, count, 3e-4), halves(rng, count, 2e-3), rest])


def q4_k(block: bytes) -> list[float]:
    d, dmin = np.frombuffer(block[:4], "<f2").astype(float)
    packed, codes = block[4:16], block[16:]
    values = []
    for group in range(8):
        if group < 4:
            scale, minimum = packed[group] & 63, packed[group + 4] & 63
        else:
            scale = packed[group + 4] & 15 | packed[group - 4] >> 6 << 4
            minimum = packed[group + 4] >> 4 | packed[group] >> 6 << 4
        part = codes[group // 2 * 32 : group // 2 * 32 + 32]
        nibbles = [byte >> 4 if group % 2 else byte & 15 for byte in part]
        values += [d * scale * code - dmin * minimum for code in nibbles]
    return values


def random_q6_k(rng: np.random.Generator, count: int) -> np.ndarray:
    """Blocks of 128 low nibbles, 64 high pairs, 16 signed scales, d: uint8 [count, 210]."""
    codes = rng.integers(0, 256, (count, 192), dtype=np.uint8)
    scales = rng.integers(-127, 128, (count, 16), dtype=np.int8).view(np.uint8)
    return np.hstack([codes, scales, halves(rng, count, 3e-5)])


def q6_k(block: bytes) -> list[float]:
    low, high = block[:128], block[128:192]
    scales, d = np.frombuffer(block[192:208], np.int8), float(np.frombuffer(block[208:], "<f2")[0])
    values = [0.0] * BLOCK
    for place in range(BLOCK):
        half, quarter, column = place // 128, place % 128 // 32, place % 32
        nibble = low[half * 64 + quarter % 2 * 32 + column]
        nibble = nibble >> 4 if quarter > 1 else nibble & 15
        code = nibble | (high[half * 32 + column] >> 2 * quarter & 3) << 4
        values[place] = d * int(scales[place // 16]) * (code - 32)
    return values


K_TYPES = {"Q4_K": (random_q4_k, q4_k), "Q6_K": (random_q6_k, q6_k)}
# Types that the ``gguf`` package expands, but does not make: values and bytes of a block, and where
# its FP16 numbers stand, with what size gives weights around 0.05.
DRAWN = {
    "Q2_K": (256, 84, {80: 5e-3, 82: 8e-3}),
    "Q3_K": (256, 110, {108: 1.5e-3}),
    "IQ4_NL": (32, 18, {0: 7e-4}),
    "IQ4_XS": (256, 136, {0: 4e-5}),
}


def drawn(kind: str, rng: np.random.Generator, count: int) -> np.ndarray:
    """Blocks of ``count`` values: uint8 [blocks, bytes]."""
    values, size, numbers = DRAWN[kind]
    blocks = rng.integers(0, 256, (count // values, size), dtype=np.uint8)
    for place, scale in numbers.items():
        blocks[:, place : place + 2] = halves(rng, len(blocks), scale)
    return blocks


def stored(
    kind: str, weight: np.ndarray, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """(bytes by rows, their values): of ``weight``, or of numbers drawn anew."""
    if kind in K_TYPES:
        draw, read = K_TYPES[kind]
        raw = draw(rng, weight.size // BLOCK)
        values = np.array([read(bytes(block)) for block in raw], dtype=np.float32)
        return raw.reshape(len(weight), -1), values.reshape(weight.shape)
    if kind in DRAWN:
        raw = drawn(kind, rng, weight.size)
    else:
        raw = gguf.quants.quantize(weight, gguf.GGMLQuantizationType[kind])
    values = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[kind])
    return raw.reshape(len(weight), -1), values.astype(np.float32).reshape(weight.shape)


def write_twins(directory: Path, kind: str):
    """A Llama of 2 layers as a GGUF file of ``kind``; returns the file and transformers' model with
    the dequantized numbers."""
    rng = np.random.default_rng(5)
    model = write_checkpoint(directory, "Llama", num_hidden_layers=2, **SHAPE)
    config = json.loads((directory / "config.json").read_text())
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    writer = gguf.GGUFWriter(str(directory / "m.gguf"), "llama")
    add_geometry(writer, config, config["rope_parameters"]["rope_theta"])
    for name, parameter in model.state_dict().items():
        weight, part = parameter.numpy(), name.split(".")[-2]
        if weight.ndim == 1:
            writer.add_tensor(gguf_name(name), weight)
            continue
        raw, values = stored(kind, weight, rng)
        with torch.no_grad():
            parameter.copy_(torch.from_numpy(values))
        if part in heads:  # bytes of a row stay together
            raw = to_gguf_rows(raw, heads[part])
        writer.add_tensor(gguf_name(name), raw, raw_dtype=gguf.GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return directory / "m.gguf", model


@pytest.mark.parametrize("kind", ["F16", "Q8_0", "Q4_1", "Q4_K", "Q6_K", *DRAWN])
def test_logits_equal_those_of_the_dequantized_weights(tmp_path: Path, kind: str) -> None:
    file, model = write_twins(tmp_path, kind)
    expected = reference_logits(model, IDS)[POSITIONS]
    assert expected.std() > 0.3
    found = all_logits(load(file), IDS)[POSITIONS]
    torch.testing.assert_close(found, expected, atol=1e-3, rtol=1e-3)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.skipif(not library.features(), reason="no kernels here")
@pytest.mark.parametrize("kind", DRAWN)
def test_logits_of_weights_kept_as_they_are_stored(tmp_path: Path, kind: str) -> None:
    """In BF16, against the expanded weights in FP32."""
    file, _ = write_twins(tmp_path, kind)
    model = load(file, "bfloat16")
    assert model.reasons["quantization"].startswith("gguf: the file's own groups")
    assert model.weight_bytes < 0.3 * load(file).weight_bytes
    found, exact = all_logits(model, IDS[:60]), all_logits(load(file), IDS[:60])
    assert float((found - exact).pow(2).mean().sqrt() / exact.std()) < 0.05
