"""Gemma 3, text: Gemma 2's norms, RMS norm on each head of q and k, five layers with a window and a
rope of their own to each layer without."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from octavo.model.families import gemma, gemma2
from octavo.model.families.family import Family, build_decoder, no_rope, read_gqa
from octavo.model.families.reading import (
    LAYER_TYPES,
    ConfigReader,
    read_norm,
    read_rope,
    read_windows,
)
from octavo.model.spec import DecoderSpec, ResidualSpec, RopeSpec


def read_its_rope(
    config: ConfigReader, head_dim: int, kind: str, key: str, theta: float
) -> RopeSpec:
    """That of the layers that ``layer_types`` calls ``kind``: the newer ``rope_parameters`` hold
    one for each, older configs have a theta under ``key``."""
    nested = config.mapping("rope_parameters", allowed=LAYER_TYPES)
    own = ConfigReader(nested, f"{config.where}: rope_parameters").mapping(kind)
    found = config.values.get(key)
    if found is None:
        found = own.get("rope_theta", theta)
    values = {**config.values, "rope_theta": found, "rope_parameters": own}
    if kind == "sliding_attention":  # nothing scales its positions
        values["rope_scaling"] = None
    return read_rope(ConfigReader(values, config.where, {"rope_theta": key}), head_dim)[0]


def from_gguf(config: dict[str, Any]) -> dict[str, Any]:
    """Without a window in the metadata no layer has one."""
    pattern = {} if config["sliding_window"] else {"sliding_window_pattern": 1}
    return {**gemma2.scale_of_gguf(config, largest=62), **pattern}


def build(config: ConfigReader) -> DecoderSpec:
    config.absent("attn_logit_softcapping")
    norm, bias = read_norm(config), gemma.read_attention_bias(config)
    gqa, longest = read_gqa(
        config, head_dim=256, rope=no_rope, qkv_bias=bias, out_bias=bias, qk_norm=norm
    )
    gqa = replace(gqa, scale=gemma2.read_scale(config))
    read = partial(read_its_rope, config, gqa.head_dim)
    everywhere = read("full_attention", "rope_theta", 1_000_000.0)
    local = read("sliding_attention", "rope_local_base_freq", 10_000.0)
    pattern = config.integer("sliding_window_pattern", 6)
    window = config.integer("sliding_window", 4096)
    windows = read_windows(config, window, lambda layer: (layer + 1) % pattern != 0)
    mlp = gemma2.read_gemma_mlp(config)
    return build_decoder(
        config,
        lambda layer: replace(
            gqa, window=windows[layer], rope=local if windows[layer] else everywhere
        ),
        lambda layer: mlp,
        longest,
        around=ResidualSpec(before=norm, after=norm),
        embedding=gemma.read_gemma_embedding(config),
        logit_softcap=config.optional_number("final_logit_softcapping", None),
    )


FAMILY = Family(
    ("Gemma3ForCausalLM",),
    ("gemma3",),
    build,
    hf_names=gemma.less_one(gemma2.SANDWICH),
    gguf_names=gemma2.GGUF_SANDWICH,
    from_gguf=from_gguf,
)
