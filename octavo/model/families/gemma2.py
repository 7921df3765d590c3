"""Gemma 2: norms on both sides of each part, soft caps on scores and logits, a window on every
other layer, scores scaled by a number of the config."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any

from octavo.model.families.family import Family, build_decoder, read_gqa
from octavo.model.families.gemma import less_one, read_attention_bias, read_gemma_embedding
from octavo.model.families.names import GGUF_NAMES, HF_NAMES
from octavo.model.families.reading import ConfigReader, read_activation, read_norm, read_windows
from octavo.model.spec import DecoderSpec, MLPSpec, ResidualSpec

SANDWICH = {
    **HF_NAMES,
    "layers.{i}.mixer_norm": "model.layers.{i}.post_attention_layernorm",
    "layers.{i}.post_norm": "model.layers.{i}.pre_feedforward_layernorm",
    "layers.{i}.mlp_norm": "model.layers.{i}.post_feedforward_layernorm",
}
GGUF_SANDWICH = {
    **GGUF_NAMES,
    "layers.{i}.mixer_norm": "blk.{i}.post_attention_norm",
    "layers.{i}.mlp_norm": "blk.{i}.post_ffw_norm",
}


def read_scale(config: ConfigReader) -> float:
    return 1 / math.sqrt(config.number("query_pre_attn_scalar", 256.0))


def read_gemma_mlp(config: ConfigReader) -> MLPSpec:
    activation = read_activation(config, "hidden_activation", "gelu_pytorch_tanh")
    return MLPSpec(config.integer("intermediate_size"), activation=activation)


def scale_of_gguf(config: dict[str, Any], largest: int) -> dict[str, Any]:
    """GGUF does not say what scores are scaled by: llama.cpp knows the 27B model, by its count of
    layers, as the only one whose number is not head_dim."""
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    scalar = config.get("head_dim", 256)
    if config["num_hidden_layers"] == largest:
        scalar = hidden // heads
    return {**config, "query_pre_attn_scalar": scalar}


def build(config: ConfigReader) -> DecoderSpec:
    bias = read_attention_bias(config)
    gqa, longest = read_gqa(config, head_dim=256, qkv_bias=bias, out_bias=bias)
    cap = config.optional_number("attn_logit_softcapping", 50.0)
    gqa = replace(gqa, scale=read_scale(config), softcap=cap)
    window = config.integer("sliding_window", 4096)
    windows = read_windows(config, window, lambda layer: layer % 2 == 0)
    mlp, norm = read_gemma_mlp(config), read_norm(config)
    return build_decoder(
        config,
        lambda layer: replace(gqa, window=windows[layer]),
        lambda layer: mlp,
        longest,
        around=ResidualSpec(before=norm, after=norm),
        embedding=read_gemma_embedding(config),
        logit_softcap=config.optional_number("final_logit_softcapping", 30.0),
    )


FAMILY = Family(
    ("Gemma2ForCausalLM",),
    ("gemma2",),
    build,
    hf_names=less_one(SANDWICH),
    gguf_names=GGUF_SANDWICH,
    from_gguf=partial(scale_of_gguf, largest=46),
)
