"""Checkpoints in all their shapes, and those that must be refused in one clear line."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import pytest
import torch
from safetensors.torch import load_file, save_file

from octavo.config import EngineConfig, ModelConfig
from octavo.flags import from_flags
from octavo.model.facts import default_sampling, eos_ids, read_spec
from octavo.model.loader.load import load_model, open_source
from octavo.model.loader.source import check_complete
from octavo.types import ConfigError
from tests.model.running import (
    all_logits,
    load,
    random_ids,
    reference_logits,
    write_checkpoint,
    write_gguf,
)

IDS = random_ids(40)


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    path = tmp_path_factory.mktemp("original")
    model = write_checkpoint(path, "Llama")
    return path, reference_logits(model, IDS)


@pytest.fixture
def copy(original, tmp_path):
    """(a copy of the checkpoint's directory, its tensors)."""
    source, _ = original
    for name in ("config.json", "generation_config.json"):
        (tmp_path / name).write_text((source / name).read_text())
    return tmp_path, load_file(source / "model.safetensors")


def split_in_two(directory: Path, tensors, names=("a.safetensors", "b.safetensors")):
    keys = list(tensors)
    halves = [keys[::2], keys[1::2]]
    for name, half in zip(names, halves):
        save_file({key: tensors[key] for key in half}, directory / name)
    return {key: name for name, half in zip(names, halves) for key in half}


def edit_config(directory: Path, **changes):
    file = directory / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


@pytest.mark.parametrize("kind", ("single", "indexed", "several"))
def test_each_layout_of_files_loads_equally(original, copy, kind):
    directory, tensors = copy
    if kind == "single":
        save_file(tensors, directory / "model.safetensors")
    else:
        weight_map = split_in_two(directory, tensors)
        if kind == "indexed":
            index = directory / "model.safetensors.index.json"
            index.write_text(json.dumps({"weight_map": weight_map}))
    torch.testing.assert_close(all_logits(load(directory), IDS), original[1], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16))
def test_stored_dtype_is_converted(copy, dtype):
    """As if the rounded numbers had been stored in FP32."""
    directory, tensors = copy
    rounded = {name: t.to(dtype) for name, t in tensors.items()}
    save_file(rounded, directory / "model.safetensors")
    found = all_logits(load(directory), IDS)
    wide = {name: t.float() for name, t in rounded.items()}
    save_file(wide, directory / "model.safetensors")
    assert torch.equal(found, all_logits(load(directory), IDS))


def refuse(directory: Path, **flags) -> str:
    with pytest.raises(ConfigError) as caught:
        load(directory, **flags)
    message = str(caught.value)
    assert "\n" not in message and str(directory) in message
    return message


def test_missing_unused_and_misshapen_tensors_are_named(copy):
    directory, tensors = copy
    file = directory / "model.safetensors"
    name = "model.layers.1.mlp.up_proj.weight"
    save_file({k: t for k, t in tensors.items() if k != name}, file)
    assert f"missing: {name}" in refuse(directory)
    save_file({**tensors, "model.layers.0.self_attn.q_norm.weight": torch.ones(16)}, file)
    assert "does not use: model.layers.0.self_attn.q_norm.weight" in refuse(directory)
    save_file({**tensors, name: torch.ones(95, 64)}, file)
    assert f"{name} is [95, 64], the config says [96, 64]" in refuse(directory)


def test_harmless_extras_are_ignored(original, copy):
    directory, tensors = copy
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}
    save_file({**tensors, **extra}, directory / "model.safetensors")
    torch.testing.assert_close(all_logits(load(directory), IDS), original[1], atol=1e-4, rtol=1e-4)


def test_tensor_in_two_files_is_refused(copy):
    directory, tensors = copy
    split_in_two(directory, tensors)
    save_file({"model.norm.weight": tensors["model.norm.weight"]}, directory / "c.safetensors")
    assert "model.norm.weight is in both" in refuse(directory)


def test_absent_shard_is_named(copy):
    directory, tensors = copy
    weight_map = split_in_two(directory, tensors)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (directory / "b.safetensors").unlink()
    assert "1 of 2 shards are absent: b.safetensors" in refuse(directory)


def test_truncated_and_damaged_files_are_refused(copy):
    directory, tensors = copy
    file = directory / "model.safetensors"
    save_file(tensors, file)
    whole = file.read_bytes()
    file.write_bytes(whole[:-100])
    assert f"truncated: {len(whole) - 100} bytes, its tensors need {len(whole)}" in refuse(
        directory
    )
    file.write_bytes(whole[:50])
    assert "truncated: the header needs" in refuse(directory)
    file.write_bytes((20).to_bytes(8, "little") + b"x" * 50)
    assert "damaged header" in refuse(directory)
    file.unlink()
    assert "no *.safetensors file" in refuse(directory)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "MambaForCausalLM is not supported; supported"),
        ({"architectures": None}, "architectures is missing"),
        ({"hidden_act": "mish"}, "hidden_act is 'mish'; this version supports one of silu"),
        ({"hidden_size": "64"}, "hidden_size is '64'"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"vocab_size": None}, "vocab_size is missing"),
        ({"num_key_value_heads": 3}, "num_key_value_heads is 3; this version supports a divisor"),
        ({"head_dim": 15}, "head_dim is 15"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings is 'yes'"),
    ],
)
def test_config_that_cannot_be_run_is_refused_by_name(copy, change, message):
    directory, tensors = copy
    save_file(tensors, directory / "model.safetensors")
    edit_config(directory, **change)
    assert message in refuse(directory)


def test_hf_overrides_win_over_the_config(copy):
    directory, _ = copy
    edit_config(directory, rope_parameters={"rope_theta": 5.0, "rope_type": "default"})
    spec = read_spec(directory, {"rope_parameters": {"rope_theta": 7.0}, "vocab_size": 100})
    assert (spec.layers[0].mixer.rope.theta, spec.vocab_size) == (7.0, 100)


def test_a_directory_may_be_called_like_a_gguf_file(copy):
    folder = copy[0].rename(copy[0].with_name("model.gguf"))
    assert read_spec(folder).architecture == "LlamaForCausalLM"


def test_dummy_weights_need_only_a_config(copy):
    directory, _ = copy
    first, again = (all_logits(load(directory, load_format="dummy"), IDS) for _ in range(2))
    other = all_logits(load(directory, load_format="dummy", seed=1), IDS)
    assert torch.equal(first, again) and not torch.equal(first, other)
    assert 0.1 < first.std() < 10


def test_load_format_must_fit_the_files(copy):
    directory, _ = copy
    assert "--load-format gguf" in refuse(directory, load_format="gguf")


def test_model_that_does_not_fit_is_refused_with_the_numbers(copy, monkeypatch):
    directory, tensors = copy
    save_file(tensors, directory / "model.safetensors")
    monkeypatch.setattr("octavo.model.loader.load.available_memory", lambda: 1000)
    assert "weights need" in refuse(directory)


def test_a_cache_dtype_other_than_the_computed_one_is_refused_not_ignored(copy):
    directory, tensors = copy
    save_file(tensors, directory / "model.safetensors")
    config = from_flags(EngineConfig, {"dtype": "float32", "kv_cache_dtype": "float16"})
    with pytest.raises(ConfigError, match="--kv-cache-dtype float16"):
        load_model(directory, config, lambda *news: None)


def test_eos_ids_of_config_and_generation_config_are_joined(copy):
    directory, _ = copy
    edit_config(directory, eos_token_id=[2, 5])
    generation = directory / "generation_config.json"
    generation.write_text('{"eos_token_id": [5, 9], "temperature": 0.6, "max_new_tokens": 7}')
    assert eos_ids(directory) == [2, 5, 9]
    assert default_sampling(directory) == {"temperature": 0.6, "max_tokens": 7}
    edit_config(directory, eos_token_id=None)
    generation.write_text('{"eos_token_id": 3, "do_sample": false, "temperature": 0.6}')
    assert eos_ids(directory) == [3] and default_sampling(directory) == {}
    generation.unlink()
    assert eos_ids(directory) == [] and default_sampling(directory) == {}


# ---- GGUF ----


def test_gguf_twin_gives_the_same_logits_far_into_the_context(tmp_path):
    """T44: q and k rows come in the other rotary order."""
    model = write_checkpoint(tmp_path, "Llama", max_position_embeddings=4096)
    ids = random_ids(2001)
    found = all_logits(load(write_gguf(tmp_path / "m.gguf", tmp_path, "F16")), ids)
    expected = reference_logits(model, ids)
    for position in (1, 100, 2000):
        torch.testing.assert_close(found[position], expected[position], atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize("kind", ("F32", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"))
def test_gguf_types_equal_the_reference_dequantization(tmp_path, kind):
    write_checkpoint(tmp_path, "Llama")
    file = write_gguf(tmp_path / "m.gguf", tmp_path, kind)
    source = open_source(file, ModelConfig(dtype="float32"))
    reader = gguf.GGUFReader(str(file))
    stored = next(t for t in reader.tensors if t.name == "blk.1.ffn_down.weight")
    expected = gguf.quants.dequantize(stored.data, stored.tensor_type)
    found = source.fetch("layers.1.down.weight", (64, 96), torch.float32)()
    torch.testing.assert_close(found, torch.from_numpy(expected.copy()).view(64, 96))


@pytest.mark.parametrize("kind", ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"))
def test_k_types_are_read(kind):
    from octavo.model.loader.gguf import dequantize

    size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]][1]
    raw = torch.randint(0, 60, (4, size), dtype=torch.uint8).numpy()
    expected = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[kind])
    found = dequantize(raw.reshape(-1), kind, "w", "m.gguf", torch.float32)
    assert torch.equal(found, torch.from_numpy(expected).view(-1))


def test_gguf_without_output_ties_the_head(tmp_path):
    model = write_checkpoint(tmp_path, "Llama", tie_word_embeddings=True)
    file = write_gguf(tmp_path / "m.gguf", tmp_path, "F32", tied=True)
    assert read_spec(file).embedding.tied
    torch.testing.assert_close(
        all_logits(load(file), IDS), reference_logits(model, IDS), atol=1e-4, rtol=1e-4
    )


def test_gguf_rope_factors_are_applied(tmp_path):
    scaling = {
        "rope_type": "llama3",
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    model = write_checkpoint(tmp_path, "Llama", rope_parameters={"rope_theta": 500.0, **scaling})
    plain = 1 / 500.0 ** (torch.arange(0, 16, 2) / 16)
    factors = plain / model.model.rotary_emb.inv_freq
    file = write_gguf(tmp_path / "m.gguf", tmp_path, "F32", factors=factors)
    torch.testing.assert_close(
        all_logits(load(file), IDS), reference_logits(model, IDS), atol=1e-4, rtol=1e-4
    )


def test_gguf_rope_factors_are_not_rounded(tmp_path):
    write_checkpoint(tmp_path, "Llama")
    factors = torch.linspace(1.0, 8.0, 8) + 0.001
    file = write_gguf(tmp_path / "m.gguf", tmp_path, "F32", factors=factors)
    model = load(file, dtype="float16")
    assert torch.equal(model._states.factors.factors, factors)


def test_gguf_facts_and_refusals(tmp_path):
    write_checkpoint(tmp_path, "Llama")
    file = write_gguf(tmp_path / "m.gguf", tmp_path, "F16")
    assert eos_ids(file) == [2, 4] and default_sampling(file) == {}
    assert "directory" not in refuse(file, load_format="safetensors")
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    refuse(file)
    other = write_gguf(tmp_path / "o.gguf", tmp_path, "F16", arch="bloom")
    assert "GGUF architecture 'bloom' is not supported; supported are llama" in refuse(other)


def test_check_is_made_from_headers_alone(copy):
    """A wrong checkpoint is told before any tensor is read."""
    directory, tensors = copy
    save_file(tensors, directory / "model.safetensors")
    source = open_source(directory, EngineConfig().model)
    source.fetch = None  # type: ignore[method-assign]
    with pytest.raises(ConfigError, match="missing"):
        check_complete(source, {"layers.9.q.weight": (64, 64)})
