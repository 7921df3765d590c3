"""OLMo 2: RMS norms of what each part gives, none before it, and of the whole q and k."""

from __future__ import annotations

from dataclasses import replace

from octavo.model.families.family import Family, build_decoder, read_gqa, read_mlp
from octavo.model.families.gemma2 import GGUF_SANDWICH, SANDWICH
from octavo.model.families.reading import ConfigReader, read_norm
from octavo.model.spec import DecoderSpec, ResidualSpec


def build(config: ConfigReader) -> DecoderSpec:
    config.absent("sliding_window")  # OLMo 3, which GGUF calls olmo2 too
    bias = config.boolean("attention_bias", False)
    norm = read_norm(config, eps=1e-5)
    gqa, longest = read_gqa(config, qkv_bias=bias, out_bias=bias, qk_norm=norm)
    gqa = replace(gqa, qk_norm_over="projection")
    mlp, around = read_mlp(config), ResidualSpec(after=norm)
    return build_decoder(
        config, lambda layer: gqa, lambda layer: mlp, longest, norm=norm, around=around
    )


FAMILY = Family(
    ("Olmo2ForCausalLM",), ("olmo2",), build, hf_names=SANDWICH, gguf_names=GGUF_SANDWICH
)
