"""GGUF headers: what the gguf package writes is read; broken files are refused in one line."""

from __future__ import annotations

import contextlib
import subprocess
import sys

import gguf
import numpy as np
import pytest

from octavo.checkpoint.gguf import GGUFFile
from octavo.types import ConfigError


@pytest.fixture
def model(tmp_path):
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(2048)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_token_list(["a", "Ġthé", "😀", ""])
    writer.add_token_scores([0.0, -1.5, -2.0, -3.0])
    writer.add_add_bos_token(True)
    writer.add_array("some.flags", [True, False])
    writer.add_tensor("plain", np.arange(12, dtype=np.float32).reshape(3, 4))
    quantized = gguf.quantize(np.ones((2, 64), np.float32), gguf.GGMLQuantizationType.Q4_1)
    writer.add_tensor("packed", quantized, raw_dtype=gguf.GGMLQuantizationType.Q4_1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_metadata_has_python_values(model):
    metadata = GGUFFile(model).metadata
    assert metadata["general.architecture"] == "llama"
    assert metadata["llama.context_length"] == 2048
    assert metadata["llama.attention.layer_norm_rms_epsilon"] == pytest.approx(1e-5)
    assert metadata["tokenizer.ggml.tokens"] == ["a", "Ġthé", "😀", ""]
    assert metadata["tokenizer.ggml.scores"].tolist() == [0.0, -1.5, -2.0, -3.0]
    assert metadata["tokenizer.ggml.add_bos_token"] is True
    assert metadata["some.flags"].tolist() == [True, False]


def test_tensors_have_row_major_shapes_and_their_bytes(model):
    file = GGUFFile(model)
    plain = file.tensors["plain"]
    assert plain.shape == (3, 4)
    assert file.raw("plain").view(np.float32).reshape(plain.shape).tolist() == [
        [0, 1, 2, 3],
        [4, 5, 6, 7],
        [8, 9, 10, 11],
    ]
    packed = file.tensors["packed"]
    assert (packed.shape, packed.num_bytes) == ((2, 64), 2 * 2 * 20)
    values = gguf.dequantize(file.raw("packed").reshape(2, -1), packed.type)
    assert np.allclose(values, 1.0)


def test_every_truncation_is_a_config_error(model, tmp_path):
    """Cut anywhere, in the header or in the data: one clear line that names the file."""
    whole = model.read_bytes()
    cut = tmp_path / "cut.gguf"
    for length in [*range(0, len(whole) - 200, 7), len(whole) - 60]:
        cut.write_bytes(whole[:length])
        with pytest.raises(ConfigError, match=r"cut\.gguf") as caught:
            _ = GGUFFile(cut).tensors
        assert "\n" not in str(caught.value)


def test_flipped_header_bytes_never_crash(model, tmp_path):
    whole = model.read_bytes()
    broken = tmp_path / "broken.gguf"
    for position in range(4, 500):
        for value in (0x00, 0x7F, 0xFF):
            changed = bytearray(whole)
            changed[position] = value
            broken.write_bytes(changed)
            with contextlib.suppress(ConfigError):
                _ = GGUFFile(broken).tensors


@pytest.mark.parametrize(
    "content, reason",
    [
        (b"", "not a GGUF file"),
        (b"PK\x03\x04 something else", "not a GGUF file"),
        (b"GGUF" + (1).to_bytes(4, "little") + bytes(32), "version 1"),
        (b"GGUF" + (3).to_bytes(4, "big") + bytes(32), "big-endian"),
    ],
)
def test_other_files_are_refused(tmp_path, content, reason):
    path = tmp_path / "x.gguf"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=reason):
        GGUFFile(path)


def test_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match="nowhere"):
        GGUFFile(tmp_path / "nowhere.gguf")


def test_reading_metadata_imports_neither_torch_nor_the_gguf_package(model):
    code = (
        f"import sys; from octavo.checkpoint.gguf import GGUFFile; GGUFFile({str(model)!r});"
        "assert not {'torch', 'gguf'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
