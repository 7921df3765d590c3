"""Qwen3 with experts: Qwen3's attention, experts in all layers but those the config names."""

from __future__ import annotations

from octavo.model.families.experts import GGUF_EXPERTS, HF_EXPERTS
from octavo.model.families.family import Family, build_decoder, read_gqa, read_mlp
from octavo.model.families.names import GGUF_NAMES, HF_NAMES
from octavo.model.families.reading import ConfigReader, read_norm
from octavo.model.families.routing import read_qwen_router, read_silu, read_sparse_layers
from octavo.model.spec import DecoderSpec, MoESpec


def build(config: ConfigReader) -> DecoderSpec:
    read_silu(config)
    if config.boolean("use_sliding_window", False):
        raise config.error("use_sliding_window", True, "false")
    bias = config.boolean("attention_bias", False)
    gqa, longest = read_gqa(config, qkv_bias=bias, out_bias=bias, qk_norm=read_norm(config))
    moe = MoESpec(read_qwen_router(config), config.integer("moe_intermediate_size"))
    mlp = read_sparse_layers(config, read_mlp(config), moe)
    return build_decoder(config, lambda layer: gqa, mlp, longest)


FAMILY = Family(
    ("Qwen3MoeForCausalLM",),
    ("qwen3moe",),
    build,
    hf_names={**HF_NAMES, "layers.{i}.router": "model.layers.{i}.mlp.gate"},
    gguf_names={**GGUF_NAMES, "layers.{i}.router": "blk.{i}.ffn_gate_inp"},
    experts=HF_EXPERTS,
    gguf_experts=GGUF_EXPERTS,
    from_gguf=lambda config: {**config, "norm_topk_prob": True},  # as llama.cpp does
)
