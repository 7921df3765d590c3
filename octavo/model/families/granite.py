"""Granite 3: Llama with factors of embeddings, scores, what each part adds, and logits."""

from __future__ import annotations

from dataclasses import replace

from octavo.model.families.family import (
    Family,
    build_decoder,
    read_embedding,
    read_gqa,
    read_mlp,
)
from octavo.model.families.reading import ConfigReader, read_norm
from octavo.model.spec import DecoderSpec, ResidualSpec


def build(config: ConfigReader) -> DecoderSpec:
    config.absent("rope_finetuned", True)  # false in GGUF: a model without a rope
    bias, norm = config.boolean("attention_bias", False), read_norm(config)
    gqa, longest = read_gqa(config, qkv_bias=bias, out_bias=bias)
    gqa = replace(gqa, scale=config.number("attention_multiplier", 1.0))
    mlp = read_mlp(config, config.boolean("mlp_bias", False))
    scale = config.number("residual_multiplier", 1.0)
    embedding = read_embedding(config)
    return build_decoder(
        config,
        lambda layer: gqa,
        lambda layer: mlp,
        longest,
        around=ResidualSpec(before=norm, scale=scale),
        embedding=replace(embedding, scale=config.number("embedding_multiplier", 1.0)),
        logit_scale=1 / config.number("logits_scaling", 1.0),
    )


FAMILY = Family(("GraniteForCausalLM",), ("granite",), build, gguf_interleaves=True)
