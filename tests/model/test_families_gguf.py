"""Families as GGUF files, written as llama.cpp's converters write them: names by the ``gguf``
package's own map, and what each converter does to the tensors (conversion/*.py there)."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from octavo.model.facts import read_spec
from octavo.model.spec import LinearScaling
from octavo.types import ConfigError
from tests.fixtures.gguf_files import to_gguf_rows
from tests.model.running import all_logits, load, random_ids, reference_logits, write_checkpoint
from tests.model.test_families import GEMMA2, GEMMA3, GRANITE
from tests.model.test_rope import LONG

Config = dict[str, Any]
Convert = Callable[[str, Tensor, Config], Tensor]


def plus_one(name: str, values: Tensor, config: Config) -> Tensor:
    return values + 1 if name.endswith("norm.weight") else values


def untransposed(name: str, values: Tensor, config: Config) -> Tensor:
    is_matrix = values.dim() == 2 and (".attn." in name or ".mlp." in name)
    return values.T.contiguous() if is_matrix else values


def interleaved(name: str, values: Tensor, config: Config) -> Tensor:
    heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
    part = name.split(".")[-2]
    if part not in heads:
        return values
    matrix = values.view(len(values), -1).numpy()
    return torch.from_numpy(to_gguf_rows(matrix, config[heads[part]])).view(values.shape)


def unchanged(name: str, values: Tensor, config: Config) -> Tensor:
    return values


def write(
    file: Path,
    source: Path,
    arch: str,
    convert: Convert,
    kind: str = "F32",
    metadata: Callable[[gguf.GGUFWriter, Config], None] = lambda writer, config: None,
    extra: dict[str, list[float]] | None = None,
) -> Path:
    """The checkpoint of ``source``; matrices in ``kind``, vectors in FP32."""
    config = json.loads((source / "config.json").read_text())
    names = {"n_layer": "num_hidden_layers", "n_head": "num_attention_heads"}
    names |= {"n_embd": "hidden_size", "n_positions": "max_position_embeddings"}
    config.update({usual: config[own] for own, usual in names.items() if own in config})
    writer = gguf.GGUFWriter(str(file), arch)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_head_count(config["num_attention_heads"])
    if "rms_norm_eps" in config:
        writer.add_feed_forward_length(config["intermediate_size"])
        writer.add_head_count_kv(config["num_key_value_heads"])
        writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    metadata(writer, config)
    by_arch = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}
    table = gguf.get_tensor_name_map(by_arch[arch], config["num_hidden_layers"])
    for name, values in load_file(source / "model.safetensors").items():
        stored = table.get_name(name, try_suffixes=(".weight", ".bias"))
        assert stored is not None, name
        values = convert(name, values.float(), config)
        kept = gguf.GGMLQuantizationType["F32" if values.dim() == 1 else kind]
        writer.add_tensor(stored, gguf.quants.quantize(values.numpy(), kept), raw_dtype=kept)
    for name, numbers in (extra or {}).items():
        writer.add_tensor(name, torch.tensor(numbers).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def gemma(writer: gguf.GGUFWriter, config: Config) -> None:
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])


def gemma2(writer: gguf.GGUFWriter, config: Config) -> None:
    gemma(writer, config)
    writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
    writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    writer.add_sliding_window(config["sliding_window"])


def gemma3(writer: gguf.GGUFWriter, config: Config) -> None:
    gemma(writer, config)
    rope = config["rope_parameters"]["full_attention"]
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
    writer.add_rope_scaling_factor(rope["factor"])
    writer.add_sliding_window(config["sliding_window"])


def phi3(writer: gguf.GGUFWriter, config: Config) -> None:
    rope = config["rope_parameters"]
    head_dim = config["hidden_size"] // config["num_attention_heads"]
    writer.add_rope_scaling_orig_ctx_len(config["original_max_position_embeddings"])
    writer.add_rope_dimension_count(int(rope.get("partial_rotary_factor", 1.0) * head_dim))
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_sliding_window(config["sliding_window"] or 0)
    if rope["rope_type"] == "longrope":
        writer.add_rope_scaling_attn_factors(1.25)


def gpt2(writer: gguf.GGUFWriter, config: Config) -> None:
    writer.add_feed_forward_length(4 * config["n_embd"])
    writer.add_layer_norm_eps(config["layer_norm_epsilon"])


def olmo2(writer: gguf.GGUFWriter, config: Config) -> None:
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])


def granite(writer: gguf.GGUFWriter, config: Config) -> None:
    olmo2(writer, config)
    writer.add_rope_dimension_count(config["hidden_size"] // config["num_attention_heads"])
    writer.add_attention_scale(config["attention_multiplier"])
    writer.add_embedding_scale(config["embedding_multiplier"])
    writer.add_residual_scale(config["residual_multiplier"])
    writer.add_logit_scale(config["logits_scaling"])


# llama.cpp scales Gemma's scores by the head's size, but for the 27B models'.
SIZED = {"query_pre_attn_scalar": 24}
FAMILIES = {
    "gemma": ("Gemma", {"head_dim": 24, "tie_word_embeddings": True}, gemma, plus_one),
    "gemma2": ("Gemma2", {**GEMMA2, **SIZED}, gemma2, plus_one),
    "gemma3": (
        "Gemma3",
        {
            **GEMMA3,
            **SIZED,
            "num_hidden_layers": 7,
            "sliding_window_pattern": 6,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        },
        gemma3,
        plus_one,
    ),
    "phi3": ("Phi3", {"sliding_window": 24, "partial_rotary_factor": 0.75}, phi3, unchanged),
    "gpt2": ("GPT2", {"tie_word_embeddings": True}, gpt2, untransposed),
    "olmo2": ("Olmo2", {}, olmo2, unchanged),
    "granite": ("Granite", {**GRANITE, "attention_bias": True}, granite, interleaved),
}


@pytest.mark.parametrize("arch", FAMILIES)
def test_logits_equal_transformers(tmp_path, arch):
    name, changes, metadata, convert = FAMILIES[arch]
    reference, ids = write_checkpoint(tmp_path, name, **changes), random_ids(90)
    file = write(tmp_path / "m.gguf", tmp_path, arch, convert, metadata=metadata)
    expected = reference_logits(reference, ids)
    torch.testing.assert_close(all_logits(load(file), ids, 33), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("arch", ("gemma2", "phi3", "gpt2", "granite"))
def test_rows_of_quantized_tensors_are_those_of_their_dequantized_values(tmp_path, arch):
    """Fused, moved and tied ones among them."""
    name, changes, metadata, convert = FAMILIES[arch]
    write_checkpoint(tmp_path, name, **changes)

    def rounded(name: str, values: Tensor, config: Config) -> Tensor:
        values = convert(name, values, config)
        if values.dim() == 1:
            return values
        kind = gguf.GGMLQuantizationType.Q8_0
        packed = gguf.quants.quantize(values.numpy(), kind)
        return torch.from_numpy(gguf.quants.dequantize(packed, kind))

    packed = write(tmp_path / "q.gguf", tmp_path, arch, convert, "Q8_0", metadata)
    dense = write(tmp_path / "d.gguf", tmp_path, arch, rounded, metadata=metadata)
    ids = random_ids(40)
    expected = all_logits(load(dense), ids)
    torch.testing.assert_close(all_logits(load(packed), ids), expected, atol=1e-4, rtol=1e-4)
    kept = all_logits(load(packed, dtype="auto", quantization="gguf"), ids)
    assert (kept - expected).abs().max() / expected.abs().max() < 0.1


@pytest.mark.parametrize("length", (50, 120))
def test_longrope_is_read_from_tensors(tmp_path, length):
    scaling = {**LONG, "attention_factor": 1.25}
    reference = write_checkpoint(
        tmp_path,
        "Phi3",
        max_position_embeddings=256,
        original_max_position_embeddings=64,
        rope_scaling=scaling,
    )
    factors = {
        f"rope_factors_{kind}.weight": scaling[f"{kind}_factor"] for kind in ("long", "short")
    }
    file = write(tmp_path / "m.gguf", tmp_path, "phi3", unchanged, metadata=phi3, extra=factors)
    model, ids = load(file), random_ids(length)
    assert model.spec.max_position == 256
    torch.testing.assert_close(
        all_logits(model, ids), reference_logits(reference, ids), atol=1e-4, rtol=1e-4
    )


def test_the_largest_gemma_scales_scores_by_another_number(tmp_path):
    changes = {**GEMMA2, "num_hidden_layers": 46, "hidden_size": 8, "intermediate_size": 8}
    write_checkpoint(tmp_path, "Gemma2", **{**changes, "num_attention_heads": 2})
    file = write(tmp_path / "m.gguf", tmp_path, "gemma2", plus_one, metadata=gemma2)
    assert read_spec(file).layers[0].mixer.scale == 0.5  # 1 / sqrt(8 / 2), not of 24


@pytest.mark.parametrize(
    ("arch", "key", "value", "message"),
    [
        ("olmo2", "attention.sliding_window", 24, "sliding_window is 24"),
        ("granite", "rope.scaling.finetuned", False, "rope_finetuned is False"),
    ],
)
def test_what_another_model_of_the_same_name_has_is_refused(tmp_path, arch, key, value, message):
    name, changes, metadata, convert = FAMILIES[arch]
    write_checkpoint(tmp_path, name, **changes)

    def more(writer: gguf.GGUFWriter, config: Config) -> None:
        metadata(writer, config)
        kind = gguf.GGUFValueType.BOOL if value is False else gguf.GGUFValueType.UINT32
        writer.add_key_value(f"{arch}.{key}", value, kind)

    file = write(tmp_path / "m.gguf", tmp_path, arch, convert, metadata=more)
    with pytest.raises(ConfigError, match=message):
        read_spec(file)


UINT, FLOAT, BOOL, TEXT = (
    gguf.GGUFValueType[kind] for kind in ("UINT32", "FLOAT32", "BOOL", "STRING")
)


def write_llama(folder, **metadata: tuple[object, gguf.GGUFValueType]) -> Path:
    write_checkpoint(folder, "Llama", max_position_embeddings=128)

    def more(writer: gguf.GGUFWriter, config: Config) -> None:
        for key, (value, kind) in metadata.items():
            writer.add_key_value(f"llama.{key}", value, kind)

    return write(folder / "m.gguf", folder, "llama", interleaved, metadata=more)


def test_yarn_has_the_files_own_bounds(tmp_path):
    file = write_llama(
        tmp_path,
        **{
            "rope.scaling.type": ("yarn", TEXT),
            "rope.scaling.factor": (4.0, FLOAT),
            "rope.scaling.original_context_length": (32, UINT),
            "rope.scaling.yarn_beta_fast": (16.0, FLOAT),
            "rope.scaling.yarn_beta_slow": (2.0, FLOAT),
        },
    )
    spec = read_spec(file)
    scaling = spec.layers[0].mixer.rope.scaling
    assert (scaling.beta_fast, scaling.beta_slow, scaling.original) == (16.0, 2.0, 32)
    assert spec.max_position == 128


@pytest.mark.parametrize("key", ("rope.scale_linear", "rope.scaling.factor"))
def test_a_factor_without_a_type_is_linear(tmp_path, key):
    """llama.cpp's default; the first key is that of files of 2023."""
    spec = read_spec(write_llama(tmp_path, **{key: (4.0, FLOAT)}))
    assert spec.layers[0].mixer.rope.scaling == LinearScaling(4.0)


@pytest.mark.parametrize(
    ("key", "value", "kind"),
    [
        ("attention.causal", False, BOOL),
        ("rope.scaling.attn_factor", 1.5, FLOAT),
        ("rope.scaling.yarn_attn_factor", 1.5, FLOAT),
        ("rope.scaling.yarn_ext_factor", 0.5, FLOAT),
    ],
)
def test_metadata_that_would_change_the_maths_is_refused(tmp_path, key, value, kind):
    with pytest.raises(ConfigError, match=f"llama.{key} is {value}; this version supports"):
        read_spec(write_llama(tmp_path, **{key: (value, kind)}))


@pytest.mark.parametrize("pattern", (3, [True, True, False, True, True, False]))
def test_which_layers_slide_is_a_period_or_a_list(tmp_path, pattern):
    write_checkpoint(tmp_path, "Gemma2", **{**GEMMA2, "num_hidden_layers": 6})

    def more(writer: gguf.GGUFWriter, config: Config) -> None:
        gemma2(writer, config)
        writer.add_sliding_window_pattern(pattern)

    file = write(tmp_path / "m.gguf", tmp_path, "gemma2", plus_one, metadata=more)
    windows = [layer.mixer.window for layer in read_spec(file).layers]
    assert windows == [24, 24, None, 24, 24, None]
