"""What families refuse in a config.json, and how strictly their fused and turned tensors load."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from octavo.model.facts import build_spec, eos_ids, read_spec
from octavo.model.families import catalogue
from octavo.model.spec import LongRopeScaling, RopeSpec
from octavo.types import ConfigError
from tests.model.running import (
    all_logits,
    load,
    random_ids,
    reference_logits,
    write_checkpoint,
    write_gguf,
)
from tests.model.test_families import FAMILIES, GEMMA2, GEMMA3
from tests.model.test_rope import LONG

IDS = random_ids(40)


def test_a_family_is_a_file_of_at_most_80_lines():
    folder = Path(catalogue.__file__).parent
    modules = {family.build.__module__.rpartition(".")[2] for family in catalogue.FAMILIES}
    lengths = {name: len((folder / f"{name}.py").read_text().splitlines()) for name in modules}
    assert len(lengths) == len(catalogue.FAMILIES)
    assert {name: length for name, length in lengths.items() if length > 80} == {}


# Configs in the words of published checkpoints, older ones too: every key that stands there beside
# those that are read. With each: heads, KV heads, head size, window and rope of the first layer.
PUBLISHED = {
    "gemma-2b": (
        {
            "architectures": ["GemmaForCausalLM"],
            "attention_bias": False,
            "attention_dropout": 0.0,
            "head_dim": 256,
            "hidden_act": "gelu",
            "hidden_activation": None,
            "hidden_size": 2048,
            "intermediate_size": 16384,
            "max_position_embeddings": 8192,
            "model_type": "gemma",
            "num_attention_heads": 8,
            "num_hidden_layers": 18,
            "num_key_value_heads": 1,
            "rms_norm_eps": 1e-06,
            "rope_scaling": None,
            "rope_theta": 10000.0,
            "vocab_size": 256000,
        },
        (8, 1, 256, None, RopeSpec(10000.0)),
    ),
    "gemma-3-1b-it": (
        {
            "architectures": ["Gemma3ForCausalLM"],
            "attention_bias": False,
            "attn_logit_softcapping": None,
            "cache_implementation": "hybrid",
            "final_logit_softcapping": None,
            "head_dim": 256,
            "hidden_activation": "gelu_pytorch_tanh",
            "hidden_size": 1152,
            "intermediate_size": 6912,
            "max_position_embeddings": 32768,
            "model_type": "gemma3_text",
            "num_attention_heads": 4,
            "num_hidden_layers": 26,
            "num_key_value_heads": 1,
            "query_pre_attn_scalar": 256,
            "rms_norm_eps": 1e-06,
            "rope_local_base_freq": 10000,
            "rope_scaling": None,
            "rope_theta": 1000000,
            "sliding_window": 512,
            "sliding_window_pattern": 6,
            "vocab_size": 262144,
        },
        (4, 1, 256, 512, RopeSpec(10000.0)),
    ),
    "Phi-4-mini-instruct": (
        {
            "architectures": ["Phi3ForCausalLM"],
            "attention_bias": False,
            "auto_map": {"AutoConfig": "configuration_phi3.Phi3Config"},
            "embd_pdrop": 0.0,
            "full_attn_mod": 1,
            "hidden_act": "silu",
            "hidden_size": 3072,
            "intermediate_size": 8192,
            "interpolate_factor": 1,
            "lm_head_bias": False,
            "max_position_embeddings": 131072,
            "mlp_bias": False,
            "model_type": "phi3",
            "num_attention_heads": 24,
            "num_hidden_layers": 32,
            "num_key_value_heads": 8,
            "original_max_position_embeddings": 4096,
            "partial_rotary_factor": 0.75,
            "rms_norm_eps": 1e-05,
            "rope_scaling": {"long_factor": [2.0] * 48, "short_factor": [1.0] * 48, "type": "su"},
            "rope_theta": 10000.0,
            "sliding_window": 262144,
            "tie_word_embeddings": True,
            "vocab_size": 200064,
        },
        (
            *(24, 8, 128, 262144),
            RopeSpec(
                10000.0,
                LongRopeScaling((1.0,) * 48, (2.0,) * 48, 4096, math.sqrt(1 + 5 / 12)),
                dim=96,
            ),
        ),
    ),
    "gpt2": (
        {
            "activation_function": "gelu_new",
            "architectures": ["GPT2LMHeadModel"],
            "attn_pdrop": 0.1,
            "initializer_range": 0.02,
            "layer_norm_epsilon": 1e-05,
            "model_type": "gpt2",
            "n_ctx": 1024,
            "n_embd": 768,
            "n_head": 12,
            "n_layer": 12,
            "n_positions": 1024,
            "summary_type": "cls_index",
            "vocab_size": 50257,
        },
        (12, 12, 64, None, None),
    ),
    "opt-350m": (
        {
            "_remove_final_layer_norm": False,
            "activation_dropout": 0.0,
            "activation_function": "relu",
            "architectures": ["OPTForCausalLM"],
            "do_layer_norm_before": False,
            "ffn_dim": 4096,
            "hidden_size": 1024,
            "layerdrop": 0.0,
            "max_position_embeddings": 2048,
            "model_type": "opt",
            "num_attention_heads": 16,
            "num_hidden_layers": 24,
            "vocab_size": 50272,
            "word_embed_proj_dim": 512,
        },
        (16, 16, 64, None, None),
    ),
    "granite-3.1-2b-instruct": (
        {
            "architectures": ["GraniteForCausalLM"],
            "attention_bias": False,
            "attention_multiplier": 0.015625,
            "embedding_multiplier": 12.0,
            "hidden_act": "silu",
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "logits_scaling": 8.0,
            "max_position_embeddings": 131072,
            "mlp_bias": False,
            "model_type": "granite",
            "num_attention_heads": 32,
            "num_hidden_layers": 40,
            "num_key_value_heads": 8,
            "residual_multiplier": 0.22,
            "rms_norm_eps": 1e-05,
            "rope_scaling": None,
            "rope_theta": 5000000.0,
            "tie_word_embeddings": True,
            "vocab_size": 49155,
        },
        (32, 8, 64, None, RopeSpec(5000000.0)),
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_configs_as_published_are_read(name):
    config, (heads, kv_heads, head_dim, window, rope) = PUBLISHED[name]
    spec = build_spec(config, Path(name))
    mixer = spec.layers[0].mixer
    assert (mixer.num_heads, mixer.num_kv_heads, mixer.head_dim) == (heads, kv_heads, head_dim)
    assert (mixer.window, mixer.rope) == (window, rope)
    layers = config.get("num_hidden_layers", config.get("n_layer"))
    assert len(spec.layers) == layers
    if name == "gemma-2b":
        assert spec.layers[0].mlp.activation == "gelu_tanh"  # not what "gelu" says
    if name == "gemma-3-1b-it":
        everywhere = [i for i, layer in enumerate(spec.layers) if layer.mixer.window is None]
        assert everywhere == [5, 11, 17, 23]
        assert {spec.layers[i].mixer.rope for i in everywhere} == {RopeSpec(1000000.0)}
    if name == "opt-350m":
        assert spec.norm is None and spec.embedding.width == 512


def edit(path: Path, **changes) -> None:
    file = path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


@pytest.mark.parametrize(
    ("family", "change", "message"),
    [
        ("Llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5.*supports 1.0"),
        ("Llama", {"rope_theta": 7.0}, "rope_theta is 7.0.*rope_parameters.rope_theta is 10000"),
        ("Gemma2", {"layer_types": ["full_attention"]}, "layer_types is .*supports 3 of full_at"),
        ("Gemma", {"use_bidirectional_attention": True}, "use_bidirectional_attention is True"),
        ("Gemma2", {"hidden_activation": "mish"}, "hidden_activation is 'mish'.*one of silu"),
        ("Gemma2", {"attn_logit_softcapping": 0}, "attn_logit_softcapping is 0"),
        ("Gemma2", {"layer_types": ["full_attention", "x", "x"]}, "layer_types is"),
        ("Gemma2", {"layer_types": [["full_attention"]] * 3}, "layer_types is"),
        ("Llama", {"quantization_config": "fp8"}, "quantization_config is 'fp8'.*JSON object"),
        ("Gemma3", {"rope_parameters": {"factor": 2.0}}, "supports keys full_.*, not factor"),
        ("Gemma3", {"rope_parameters": {"full_attention": 3}}, "full_attention is 3.*JSON object"),
        ("Gemma3", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping is 50.*supports null"),
        ("Phi3", {"attention_bias": True}, "attention_bias is True.*supports null, false"),
        ("Phi3", {"partial_rotary_factor": 0.7}, "partial_rotary_factor is 0.7"),  # 11 of 16
        ("Phi3", {"rope_scaling": {"rope_type": ["yarn"]}}, "rope_type is .'yarn'.*one of default"),
        ("Phi3", {"partial_rotary_factor": 0.01}, "partial_rotary_factor is 0.01"),  # none
        ("Phi3", {"original_max_position_embeddings": 1, "rope_scaling": LONG}, "embeddings is 1"),
        ("GPT2", {"n_embd": "64"}, "n_embd is '64'"),
        ("GPT2", {"add_cross_attention": True}, "add_cross_attention is True"),
        ("GPT2", {"activation_function": "tanh"}, "activation_function is 'tanh'"),
        ("OPT", {"layer_norm_elementwise_affine": False}, "layer_norm_elementwise_affine is False"),
        ("OPT", {"ffn_dim": None}, "ffn_dim is missing"),
        ("Granite", {"attention_multiplier": 0}, "attention_multiplier is 0"),
    ],
)
def test_values_that_would_change_the_maths_are_refused_by_name(tmp_path, family, change, message):
    write_checkpoint(tmp_path, family)
    if family in ("Llama", "Phi3") and "partial_rotary_factor" in change:
        rope = {"rope_theta": 10000.0, "rope_type": "default"}
        edit(tmp_path, rope_parameters=rope)
    edit(tmp_path, **change)
    with pytest.raises(ConfigError, match=message):
        read_spec(tmp_path)


def test_older_configs_say_the_same(tmp_path):
    """As those of the first releases do: two activations, a pattern, thetas at the top."""
    write_checkpoint(tmp_path, "Gemma3", **GEMMA3)
    new = read_spec(tmp_path)
    old = {"rope_parameters": None, "layer_types": None, "sliding_window_pattern": 3}
    edit(tmp_path, **old, rope_theta=1_000_000.0, rope_local_base_freq=10_000.0)
    assert read_spec(tmp_path) == new
    edit(tmp_path, rope_local_base_freq=20_000.0)
    assert read_spec(tmp_path).layers[0].mixer.rope.theta == 20_000.0
    edit(tmp_path, rope_theta=None, rope_local_base_freq=None)
    assert read_spec(tmp_path) == new  # null says as little as no key
    edit(tmp_path, rope_local_base_freq=0)
    with pytest.raises(ConfigError, match="rope_local_base_freq is 0"):
        read_spec(tmp_path)


def test_overrides_reach_what_a_family_reads(tmp_path):
    write_checkpoint(tmp_path, "Gemma2", **GEMMA2)
    overrides = {"sliding_window": 7, "query_pre_attn_scalar": 16, "eos_token_id": [5, 6]}
    spec = read_spec(tmp_path, overrides)
    assert (spec.layers[0].mixer.window, spec.layers[0].mixer.scale) == (7, 0.25)
    assert eos_ids(tmp_path, overrides)[:2] == [5, 6]
    model = load(tmp_path, hf_overrides={"final_logit_softcapping": 0.5})
    assert all_logits(model, IDS).abs().max() <= 0.5


def test_an_override_wins_over_a_gguf_files_own_eos(tmp_path):
    write_checkpoint(tmp_path, "Llama")
    file = write_gguf(tmp_path / "m.gguf", tmp_path, "F32")
    assert eos_ids(file) == [2, 4]
    assert eos_ids(file, {"eos_token_id": 9}) == [9, 4]


@pytest.mark.parametrize(
    ("family", "base"), [("GPT2", "transformer."), ("OPT", "model."), ("Llama", "model.")]
)
def test_a_model_saved_without_its_head_has_no_prefix(tmp_path, family, base):
    """As openai-community/gpt2 and facebook/opt-125m are; the first with what its code masks by."""
    reference = write_checkpoint(tmp_path, family, tie_word_embeddings=True)
    file = tmp_path / "model.safetensors"
    tensors = {name.removeprefix(base): t for name, t in load_file(file).items()}
    if family == "GPT2":
        tensors["h.0.attn.bias"] = torch.ones(1, 1, 256, 256)
        tensors["h.0.attn.masked_bias"] = torch.tensor(-1e4)
    save_file(tensors, file)
    found = all_logits(load(tmp_path), IDS)
    torch.testing.assert_close(found, reference_logits(reference, IDS), atol=1e-4, rtol=1e-4)


QKV = "model.layers.1.self_attn.qkv_proj.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(QKV), f"tensors are missing: {QKV}$"),
        (lambda t: t.update({QKV: t[QKV][:-1].clone()}), r"is \[127, 64\], the config says \[128"),
        (lambda t: t.update({QKV: torch.cat((t[QKV], t[QKV][:2]))}), r"is \[130, 64\], the config"),
        (
            lambda t: t.update({QKV.replace("qkv", "q"): t[QKV][:64].clone()}),
            "does not use: model.layers.1.self_attn.q_proj.weight",
        ),
    ],
)
def test_every_row_of_a_fused_tensor_is_used_once(tmp_path, change, message):
    write_checkpoint(tmp_path, "Phi3")
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)
    with pytest.raises(ConfigError, match=message):
        load(tmp_path)


def test_a_turned_tensor_of_the_other_shape_is_refused(tmp_path):
    write_checkpoint(tmp_path, "GPT2")
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    name = "transformer.h.0.mlp.c_fc.weight"
    tensors[name] = tensors[name].T.contiguous()
    save_file(tensors, file)
    with pytest.raises(ConfigError, match=r"c_fc.weight is \[256, 64\], the config says \[64, 256"):
        load(tmp_path)


def test_loading_leaves_the_files_numbers_alone(tmp_path):
    """Gemma's norms get 1 added, once each time."""
    write_checkpoint(tmp_path, *FAMILIES["gemma"][:1], **FAMILIES["gemma"][1])
    before = (tmp_path / "model.safetensors").read_bytes()
    first, again = load(tmp_path), load(tmp_path)
    assert torch.equal(all_logits(first, IDS), all_logits(again, IDS))
    assert (tmp_path / "model.safetensors").read_bytes() == before
