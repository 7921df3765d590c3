"""Llama 2 and 3.x, SmolLM2, TinyLlama and everything else stored as LlamaForCausalLM."""

from __future__ import annotations

from octavo.model.families.family import Family, build_decoder
from octavo.model.families.reading import ConfigReader
from octavo.model.spec import DecoderSpec


def build(config: ConfigReader) -> DecoderSpec:
    bias = config.boolean("attention_bias", False)
    return build_decoder(
        config, qkv_bias=bias, out_bias=bias, mlp_bias=config.boolean("mlp_bias", False)
    )


FAMILY = Family(("LlamaForCausalLM",), ("llama",), build, gguf_interleaves=True)
