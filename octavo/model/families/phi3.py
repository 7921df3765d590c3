"""Phi-3, 3.5 and 4 (mini): fused qkv and gate/up tensors, a rope that may turn a part of each head
and grow by factors of its own (longrope), a window."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from octavo.model.families.family import Family, build_decoder, read_gqa, read_mlp
from octavo.model.families.names import GGUF_NAMES, HF_NAMES, Names
from octavo.model.families.reading import ConfigReader, read_norm, read_rope
from octavo.model.spec import DecoderSpec


def with_longrope(config: ConfigReader) -> ConfigReader:
    """Older configs call longrope "su", and the first ones "yarn", with longrope's factors."""
    values = dict(config.values)
    for key in ("rope_scaling", "rope_parameters"):
        own = values.get(key)
        if not isinstance(own, Mapping):
            continue
        if any(own.get(name) in ("su", "yarn") for name in ("type", "rope_type")):
            values[key] = {**own, "type": "longrope", "rope_type": "longrope"}
    return ConfigReader(values, config.where)


def fused(names: Names, qkv: str, gate_up: str) -> Names:
    """``names`` with q, k and v in one tensor, gate and up in another."""
    shared = {**dict.fromkeys(("q", "k", "v"), qkv), **dict.fromkeys(("gate", "up"), gate_up)}
    return {**names, **{f"layers.{{i}}.{part}": name for part, name in shared.items()}}


def build(config: ConfigReader) -> DecoderSpec:
    for key in ("attention_bias", "mlp_bias", "lm_head_bias"):
        config.absent(key, False)
    gqa, longest = read_gqa(with_longrope(config), rope=partial(read_rope, partial=True))
    if config.has("sliding_window"):
        gqa = replace(gqa, window=config.integer("sliding_window"))
    mlp = read_mlp(config)
    norm = read_norm(config, eps=1e-5)
    return build_decoder(config, lambda layer: gqa, lambda layer: mlp, longest, norm=norm)


FAMILY = Family(
    ("Phi3ForCausalLM",),
    ("phi3",),
    build,
    hf_names=fused(
        HF_NAMES,
        "model.layers.{i}.self_attn.qkv_proj",
        "model.layers.{i}.mlp.gate_up_proj",
    ),
    gguf_names=fused(GGUF_NAMES, "blk.{i}.attn_qkv", "blk.{i}.ffn_up"),
)
