"""Qwen3 (dense): RMS norm on each head of q and k, a head size of its own, no biases."""

from __future__ import annotations

from octavo.model.families.family import Family, build_decoder
from octavo.model.families.qwen2 import window_of
from octavo.model.families.reading import ConfigReader
from octavo.model.spec import DecoderSpec


def build(config: ConfigReader) -> DecoderSpec:
    bias = config.boolean("attention_bias", False)
    return build_decoder(
        config,
        qkv_bias=bias,
        out_bias=bias,
        qk_norm=True,
        window=window_of(config),
        head_dim=128,
    )


FAMILY = Family(("Qwen3ForCausalLM",), ("qwen3",), build)
