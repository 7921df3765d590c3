"""Checkpoints that are damaged, or made to do harm: each is refused in one short line, at once."""

from __future__ import annotations

import json
import os
import shutil
import struct
from pathlib import Path

import gguf
import pytest
import torch
from safetensors.torch import load_file, save_file

from octavo.checkpoint.gguf import GGUFFile
from octavo.checkpoint.locate import locate
from octavo.checkpoint.special import gguf_eos_ids
from octavo.model.facts import gguf_config, read_spec
from octavo.types import ConfigError
from tests.model.expert_families import DEEPSEEK, QWEN
from tests.model.running import load, write_checkpoint, write_gguf

LAYER = "model.layers.{}.self_attn.q_proj.weight"


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    path = tmp_path_factory.mktemp("llama")
    write_checkpoint(path, "Llama")
    return path


@pytest.fixture
def checkpoint(llama, tmp_path):
    return Path(shutil.copytree(llama, tmp_path / "model"))


def refusal(call, *arguments, **flags) -> str:
    with pytest.raises(ConfigError) as caught:
        call(*arguments, **flags)
    text = str(caught.value)
    assert "\n" not in text and len(text) < 600
    return text


def set_config(directory: Path, **changes: object) -> None:
    file = directory / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


@pytest.mark.parametrize(
    "changes",
    [
        *({"num_hidden_layers": count} for count in (10**6, 10**18, 1e300)),
        *({"hidden_size": 1e300}, {"vocab_size": 10**30}, {"rope_theta": 1e300}),
        *({"quantization_config": value} for value in ("fp8", 1, ["a"], True)),
        *({"rope_scaling": value} for value in ("", 0, [], False)),
    ],
    ids=str,
)
def test_absurd_values_of_a_config_are_named(checkpoint, changes):
    set_config(checkpoint, rope_parameters=None, **changes)
    assert next(iter(changes)) in refusal(read_spec, checkpoint)


@pytest.mark.parametrize(
    ("name", "values", "key"),
    [
        ("Qwen3Moe", {**QWEN, "head_dim": 32}, "num_experts"),
        ("DeepseekV3", DEEPSEEK, "n_routed_experts"),
        ("DeepseekV3", DEEPSEEK, "num_nextn_predict_layers"),
    ],
)
def test_absurd_numbers_of_parts_are_refused(tmp_path, name, values, key):
    write_checkpoint(tmp_path, name, **values)
    set_config(tmp_path, **{key: 10**9})
    assert "at most 10,000" in refusal(read_spec, tmp_path)


def rewrite_header(file: Path, change) -> None:
    raw = file.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = change(json.loads(raw[8 : 8 + length]))
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + length :])


@pytest.mark.parametrize(
    "entry",
    [
        *({"dtype": value} for value in ([], {}, None, 1)),
        *({"shape": value} for value in ([64.0, 64.0], ["64", "64"], "ab", [-64, -64], [[64], 64])),
        *({"data_offsets": pair} for pair in ([-16384, 0], [0.0, 16384.0], [16384, 0], [0, 1, 2])),
        {"data_offsets": [-10, 16374]},  # begins in the header
    ],
    ids=str,
)
def test_entries_of_a_safetensors_header_are_checked(checkpoint, entry):
    name = LAYER.format(0)

    def change(header):
        return {**header, name: {**header[name], **entry}}

    rewrite_header(checkpoint / "model.safetensors", change)
    assert "damaged header" in refusal(load, checkpoint)


def test_tensors_that_share_bytes_are_refused(checkpoint):
    one, other = LAYER.format(0), LAYER.format(1)

    def change(header):
        return {**header, one: {**header[one], "data_offsets": header[other]["data_offsets"]}}

    rewrite_header(checkpoint / "model.safetensors", change)
    assert one in (text := refusal(load, checkpoint)) and other in text


def test_deep_json_is_refused_wherever_it_is_read(checkpoint):
    deep = b'{"weight_map":' * 100_000
    rewrite_header(checkpoint / "model.safetensors", lambda header: deep)
    refusal(load, checkpoint)
    (checkpoint / "model.safetensors.index.json").write_bytes(deep)
    refusal(load, checkpoint)
    (checkpoint / "config.json").write_bytes(deep)
    refusal(load, checkpoint)


@pytest.mark.parametrize("place", ["../model.safetensors", "..", "", "a\0b", "x" * 5000, "/etc/x"])
def test_an_index_names_nothing_outside_its_directory(checkpoint, place):
    index = {"weight_map": {LAYER.format(0): place}}
    (checkpoint / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "which is no file beside it" in refusal(load, checkpoint)


def test_pipes_are_not_waited_for(checkpoint, tmp_path):
    os.mkfifo(tmp_path / "pipe.gguf")
    refusal(locate, str(tmp_path / "pipe.gguf"))
    (checkpoint / "model.safetensors").unlink()
    os.mkfifo(checkpoint / "model.safetensors")
    refusal(load, checkpoint)


@pytest.mark.parametrize("name", ["/" + "x" * 5000, "x" * 5000, "/tmp/\0"])
def test_names_that_no_file_can_have_are_refused(name):
    refusal(locate, name)


def test_negated_views_in_a_bin_file_are_refused(checkpoint):
    weights = load_file(checkpoint / "model.safetensors")
    (checkpoint / "model.safetensors").unlink()
    weights[LAYER.format(0)] = torch._neg_view(weights[LAYER.format(0)])
    torch.save(weights, checkpoint / "pytorch_model.bin")
    assert LAYER.format(0) in refusal(load, checkpoint)


def test_a_head_of_its_own_beside_a_tied_embedding(checkpoint):
    """Equal it is left out; where it differs nobody can know which of the two is meant."""
    file = checkpoint / "model.safetensors"
    set_config(checkpoint, tie_word_embeddings=True)
    assert "--hf-overrides.tie_word_embeddings false" in refusal(load, checkpoint)
    weights = load_file(file)
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    save_file(weights, file)
    load(checkpoint)


# ---- GGUF ----

TYPES = gguf.GGUFValueType
ODD = [("x", TYPES.STRING), ([4, 4, 4], TYPES.ARRAY), (["a"], TYPES.ARRAY), (-1, TYPES.INT32)]
KEYS = (
    *("llama.block_count", "llama.attention.head_count", "llama.attention.key_length"),
    *("llama.rope.dimension_count", "llama.rope.freq_base", "llama.rope.scaling.factor"),
    *("llama.expert_count", "llama.attention.clamp_kqv", "split.tensors.count"),
    *("general.alignment",),
)


def write_metadata(file: Path, *pairs: tuple[str, object, gguf.GGUFValueType]) -> Path:
    """A GGUF file of one small embedding; a later pair replaces an earlier one's value."""
    writer = gguf.GGUFWriter(str(file), "llama")
    found = {
        "llama.block_count": (2, TYPES.UINT32),
        "llama.context_length": (64, TYPES.UINT32),
        "llama.embedding_length": (64, TYPES.UINT32),
        "llama.feed_forward_length": (96, TYPES.UINT32),
        "llama.attention.head_count": (4, TYPES.UINT32),
        "llama.attention.layer_norm_rms_epsilon": (1e-5, TYPES.FLOAT32),
        **{key: (value, kind) for key, value, kind in pairs},
    }
    for key, (value, kind) in found.items():
        writer.add_key_value(key, value, kind)
    writer.add_tensor("token_embd.weight", torch.zeros(8, 64).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


@pytest.mark.parametrize(("value", "kind"), ODD, ids=str)
@pytest.mark.parametrize("key", KEYS)
def test_metadata_of_other_types_is_refused(tmp_path, key, value, kind):
    refusal(read_spec, write_metadata(tmp_path / "m.gguf", (key, value, kind)))


@pytest.mark.parametrize(("value", "kind"), ODD[:3], ids=str)
def test_ids_of_other_types_are_refused(value, kind):
    assert "eos_token_id" in refusal(gguf_eos_ids, {"tokenizer.ggml.eos_token_id": value})


@pytest.mark.parametrize(
    ("key", "value", "kind"),
    [
        ("llama.attention.clamp_kqv", 8.0, TYPES.FLOAT32),
        ("llama.attention.causal", False, TYPES.BOOL),
        ("llama.attention.max_alibi_bias", 8.0, TYPES.FLOAT32),
    ],
)
def test_metadata_that_changes_the_maths_is_refused(tmp_path, key, value, kind):
    assert key in refusal(read_spec, write_metadata(tmp_path / "m.gguf", (key, value, kind)))


def test_layers_without_number_are_refused_before_their_windows_are_listed(tmp_path):
    file = write_metadata(
        tmp_path / "m.gguf",
        ("llama.block_count", 2**40, TYPES.UINT64),
        ("llama.attention.sliding_window", 8, TYPES.UINT32),
        ("llama.attention.sliding_window_pattern", 2, TYPES.UINT32),
    )
    assert "at most 10,000" in refusal(read_spec, file)


@pytest.mark.parametrize("name", [b"\x1b[2J", b"a\nb", b"x" * 70_000])
def test_names_that_would_steer_a_terminal_are_not_shown(tmp_path, name):
    file = tmp_path / "m.gguf"
    pair = struct.pack("<Q", len(name)) + name + struct.pack("<II", 4, 1)
    file.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + pair)
    assert refusal(GGUFFile, file).isprintable()


@pytest.mark.parametrize("kind", [0, 4, 8, 9, 12, 13])
def test_arrays_longer_than_the_file_take_no_memory(tmp_path, kind):
    file = tmp_path / "m.gguf"
    array = struct.pack("<IIQ", 9, kind, 2**40)
    pair = struct.pack("<Q", 1) + b"a" + array + b"\0" * 4096
    file.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + pair)
    refusal(GGUFFile, file)


def test_half_of_a_long_rope_is_refused(llama, tmp_path):
    file = write_gguf(tmp_path / "m.gguf", llama, "F32")
    config = gguf_config(GGUFFile(file))
    assert config["rope_scaling"] is None
    writer = gguf.GGUFWriter(str(tmp_path / "half.gguf"), "llama")
    for key in ("block_count", "context_length", "embedding_length", "attention.head_count"):
        writer.add_uint32(f"llama.{key}", 4)
    writer.add_tensor("token_embd.weight", torch.zeros(8, 4).numpy())
    writer.add_tensor("rope_factors_long.weight", torch.ones(2).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    text = refusal(read_spec, tmp_path / "half.gguf")
    assert "rope_factors_short.weight is missing" in text
