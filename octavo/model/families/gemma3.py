"""Gemma 3, text: Gemma 2's norms, RMS norm on each head of q and k, five layers with a window and a
rope of their own to each layer without."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from octavo.model.families.family import Family, build_decoder, no_rope, read_gqa
from octavo.model.families.gemma import less_one, read_attention_bias, read_gemma_embedding
from octavo.model.families.gemma2 import (
    GGUF_SANDWICH,
    SANDWICH,
    read_gemma_mlp,
    read_scale,
    scale_of_gguf,
)
from octavo.model.families.names import GGUF_NAMES, HF_NAMES
from octavo.model.families.reading import ConfigReader, read_norm, read_rope, read_windows
from octavo.model.spec import DecoderSpec, ResidualSpec, RopeSpec

GLOBAL_THETA, LOCAL_THETA = 1_000_000.0, 10_000.0


def read_ropes(config: ConfigReader, head_dim: int) -> tuple[RopeSpec, RopeSpec]:
    """Of layers without a window, whose positions ``rope_scaling`` scales, and of those with one.
    The newer ``rope_parameters`` hold both, by ``layer_types``."""
    nested = config.values.get("rope_parameters") or {}
    found = []
    for kind, key, theta in (
        ("full_attention", "rope_theta", GLOBAL_THETA),
        ("sliding_attention", "rope_local_base_freq", LOCAL_THETA),
    ):
        own = nested.get(kind) or {}
        if not isinstance(own, Mapping):
            raise config.error(f"rope_parameters.{kind}", own, "null or a JSON object")
        values = {
            **config.values,
            "rope_theta": config.values.get(key, own.get("rope_theta", theta)),
            "rope_parameters": own,
            "rope_scaling": config.values.get("rope_scaling") if kind == "full_attention" else None,
        }
        reader = ConfigReader(values, config.where, {"rope_theta": key})
        found.append(read_rope(reader, head_dim)[0])
    return found[0], found[1]


def from_gguf(config: dict[str, Any]) -> dict[str, Any]:
    """Without a window in the metadata no layer has one."""
    pattern = {} if config["sliding_window"] else {"sliding_window_pattern": 1}
    return {**scale_of_gguf(config, largest=62), **pattern}


def build(config: ConfigReader) -> DecoderSpec:
    config.absent("attn_logit_softcapping")
    norm, bias = read_norm(config), read_attention_bias(config)
    gqa, longest = read_gqa(
        config, head_dim=256, rope=no_rope, qkv_bias=bias, out_bias=bias, qk_norm=norm
    )
    gqa = replace(gqa, scale=read_scale(config))
    everywhere, local = read_ropes(config, gqa.head_dim)
    pattern = config.integer("sliding_window_pattern", 6)
    window = config.integer("sliding_window", 4096)
    windows = read_windows(config, window, lambda layer: (layer + 1) % pattern != 0)
    mlp = read_gemma_mlp(config)
    return build_decoder(
        config,
        lambda layer: replace(
            gqa, window=windows[layer], rope=local if windows[layer] else everywhere
        ),
        lambda layer: mlp,
        longest,
        around=ResidualSpec(before=norm, after=norm),
        embedding=read_gemma_embedding(config),
        logit_softcap=config.optional_number("final_logit_softcapping", None),
    )


FAMILY = Family(
    ("Gemma3ForCausalLM", "Gemma3TextForCausalLM"),
    ("gemma3",),
    build,
    hf_names=less_one({**HF_NAMES, **SANDWICH}),
    gguf_names={**GGUF_NAMES, **GGUF_SANDWICH},
    from_gguf=from_gguf,
)
