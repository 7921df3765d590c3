"""Qwen1.5-MoE and Qwen2 with experts: beside them a shared one, weighed by a gate of its own."""

from __future__ import annotations

from octavo.model.families.experts import HF_EXPERTS
from octavo.model.families.family import Family, build_decoder, read_gqa, read_mlp
from octavo.model.families.names import HF_NAMES
from octavo.model.families.reading import ConfigReader
from octavo.model.families.routing import read_qwen_router, read_silu, read_sparse_layers
from octavo.model.spec import DecoderSpec, MLPSpec, MoESpec

_SHARED = "model.layers.{i}.mlp.shared_expert"


def build(config: ConfigReader) -> DecoderSpec:
    read_silu(config)
    if config.boolean("use_sliding_window", False):
        raise config.error("use_sliding_window", True, "false")
    gqa, longest = read_gqa(config, qkv_bias=config.boolean("qkv_bias", True))
    moe = MoESpec(
        read_qwen_router(config),
        config.integer("moe_intermediate_size"),
        shared=MLPSpec(config.integer("shared_expert_intermediate_size")),
        shared_gate=True,
    )
    mlp = read_sparse_layers(config, read_mlp(config), moe)
    return build_decoder(config, lambda layer: gqa, mlp, longest)


FAMILY = Family(
    ("Qwen2MoeForCausalLM",),
    (),
    build,
    hf_names={
        **HF_NAMES,
        "layers.{i}.router": "model.layers.{i}.mlp.gate",
        "layers.{i}.shared.gate": f"{_SHARED}.gate_proj",
        "layers.{i}.shared.up": f"{_SHARED}.up_proj",
        "layers.{i}.shared.down": f"{_SHARED}.down_proj",
        "layers.{i}.shared_gate": f"{_SHARED}_gate",
    },
    experts=HF_EXPERTS,
)
