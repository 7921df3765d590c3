"""gpt-oss: attention with sinks and a window on every other layer; experts with biases and a
clamped SwiGLU, published in MXFP4."""

from __future__ import annotations

from dataclasses import replace

from octavo.model.families.experts import GPT_OSS_EXPERTS
from octavo.model.families.family import Family, build_decoder, read_gqa
from octavo.model.families.names import HF_NAMES
from octavo.model.families.reading import ConfigReader, read_norm, read_windows
from octavo.model.families.routing import read_num_experts, read_router, read_silu
from octavo.model.spec import DecoderSpec, MoESpec

ALPHA, LIMIT = 1.702, 7.0  # of the clamped SwiGLU (octavo.ops.moe)


def build(config: ConfigReader) -> DecoderSpec:
    read_silu(config)
    if not config.has("rope_scaling") and not config.has("rope_parameters"):
        raise config.error("rope_scaling", None, "yarn, as in the published config.json")
    config.absent("swiglu_alpha", ALPHA)
    config.absent("swiglu_limit", LIMIT)
    bias = config.boolean("attention_bias", True)
    gqa, longest = read_gqa(config, head_dim=64, qkv_bias=bias, out_bias=bias)
    window = config.integer("sliding_window", 128)
    windows = read_windows(config, window, lambda layer: layer % 2 == 0)
    router = read_router(config, read_num_experts(config), bias=True)
    size = config.integer("intermediate_size")
    moe = MoESpec(router, size, activation="swiglu_clamped", bias=True)
    return build_decoder(
        config,
        lambda layer: replace(gqa, sinks=True, window=windows[layer]),
        lambda layer: moe,
        longest,
        norm=read_norm(config, 1e-5),
    )


FAMILY = Family(
    ("GptOssForCausalLM",),
    (),
    build,
    hf_names={
        **HF_NAMES,
        "layers.{i}.router": "model.layers.{i}.mlp.router",
        "layers.{i}.sinks.weight": "model.layers.{i}.self_attn.sinks",
    },
    experts=GPT_OSS_EXPERTS,
)
