"""What DeepSeek-V2, V3 and those built like them read alike: multi-head latent attention, and after
a few dense layers experts beside shared ones."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from octavo.model.families.family import build_decoder
from octavo.model.families.names import HF_NAMES, Names
from octavo.model.families.reading import ConfigReader, read_rope, yarn_magnitude
from octavo.model.families.routing import read_silu
from octavo.model.spec import DecoderSpec, MLASpec, MLPSpec, MoESpec, RMSNormSpec, RouterSpec

LATENT_NORM = RMSNormSpec(1e-6)  # whatever rms_norm_eps says of the others
_ATTENTION, _MLP = "model.layers.{i}.self_attn", "model.layers.{i}.mlp"
NAMES: Names = {
    **HF_NAMES,
    "layers.{i}.q_down": f"{_ATTENTION}.q_a_proj",
    "layers.{i}.q_down_norm": f"{_ATTENTION}.q_a_layernorm",
    "layers.{i}.q_up": f"{_ATTENTION}.q_b_proj",
    "layers.{i}.kv_down": f"{_ATTENTION}.kv_a_proj_with_mqa",
    "layers.{i}.kv_down_norm": f"{_ATTENTION}.kv_a_layernorm",
    "layers.{i}.kv_up": f"{_ATTENTION}.kv_b_proj",
    "layers.{i}.router": f"{_MLP}.gate",
    "layers.{i}.router.correction": f"{_MLP}.gate.e_score_correction_bias",
    "layers.{i}.shared.gate": f"{_MLP}.shared_experts.gate_proj",
    "layers.{i}.shared.up": f"{_MLP}.shared_experts.up_proj",
    "layers.{i}.shared.down": f"{_MLP}.shared_experts.down_proj",
}


def build_latent(config: ConfigReader, router: RouterSpec, mlp_bias: bool = False) -> DecoderSpec:
    read_silu(config)
    config.absent("moe_layer_freq", 1)
    mla, longest = read_mla(config)
    size = config.integer("moe_intermediate_size")
    mlp = MLPSpec(config.integer("intermediate_size"), mlp_bias)
    moe = MoESpec(router, size)
    if shared := config.integer("n_shared_experts", 0, low=0):
        moe = replace(moe, shared=MLPSpec(size * shared, mlp_bias))
    dense = config.integer("first_k_dense_replace", 0, low=0)
    spec = build_decoder(
        config, lambda layer: mla, lambda layer: mlp if layer < dense else moe, longest
    )
    return replace(spec, draft_layers=config.count("num_nextn_predict_layers", 0, low=0))


def read_mla(config: ConfigReader) -> tuple[MLASpec, int]:
    """Latent attention and the longest context."""
    config.absent("attention_bias", False)
    heads = config.integer("num_attention_heads")
    config.absent("num_key_value_heads", heads)
    nope, turned = config.integer("qk_nope_head_dim"), config.integer("qk_rope_head_dim")
    if turned % 2:
        raise config.error("qk_rope_head_dim", turned, "an even number (rotary pairs)")
    rope, longest = read_rope(config, turned)
    raw: Any = config.values.get("rope_scaling") or config.values.get("rope_parameters") or {}
    scale = 1 / math.sqrt(nope + turned)
    if rope.scaling and raw.get("mscale_all_dim"):
        reader = ConfigReader(raw, f"{config.where}: rope_scaling")
        scale *= yarn_magnitude(reader.number("factor"), reader.number("mscale_all_dim")) ** 2
    spec = MLASpec(
        num_heads=heads,
        latent_dim=config.integer("kv_lora_rank"),
        nope_dim=nope,
        rope_dim=turned,
        value_dim=config.integer("v_head_dim"),
        query_rank=config.integer("q_lora_rank") if config.has("q_lora_rank") else None,
        rope=rope,
        norm=LATENT_NORM,
        scale=scale,
        interleaved=config.boolean("rope_interleave", True),
    )
    return spec, longest
