"""Qwen3 (dense): RMS norm on each head of q and k, a head size of its own, no biases."""

from __future__ import annotations

from dataclasses import replace

from octavo.model.families.family import Family, build_decoder, read_gqa, read_mlp
from octavo.model.families.qwen2 import windows_of
from octavo.model.families.reading import ConfigReader, read_norm
from octavo.model.spec import DecoderSpec


def build(config: ConfigReader) -> DecoderSpec:
    bias = config.boolean("attention_bias", False)
    gqa, longest = read_gqa(
        config, head_dim=128, qkv_bias=bias, out_bias=bias, qk_norm=read_norm(config)
    )
    windows, mlp = windows_of(config), read_mlp(config)
    return build_decoder(
        config, lambda layer: replace(gqa, window=windows[layer]), lambda layer: mlp, longest
    )


FAMILY = Family(("Qwen3ForCausalLM",), ("qwen3",), build)
