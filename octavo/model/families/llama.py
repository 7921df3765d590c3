"""Llama 2 and 3.x, SmolLM2, TinyLlama and everything else stored as LlamaForCausalLM."""

from __future__ import annotations

from octavo.model.families.family import Family, build_decoder, read_gqa, read_mlp
from octavo.model.families.reading import ConfigReader
from octavo.model.spec import DecoderSpec


def build(config: ConfigReader) -> DecoderSpec:
    bias = config.boolean("attention_bias", False)
    gqa, longest = read_gqa(config, qkv_bias=bias, out_bias=bias)
    mlp = read_mlp(config, config.boolean("mlp_bias", False))
    return build_decoder(config, lambda layer: gqa, lambda layer: mlp, longest)


FAMILY = Family(("LlamaForCausalLM",), ("llama",), build, gguf_interleaves=True)
