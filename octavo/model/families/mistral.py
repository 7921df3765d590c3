"""Mistral: Llama's shape with a sliding window and a head size of its own. GGUF calls it llama."""

from __future__ import annotations

from dataclasses import replace

from octavo.model.families.family import Family, build_decoder, read_gqa, read_mlp
from octavo.model.families.reading import ConfigReader
from octavo.model.spec import DecoderSpec

DEFAULT_WINDOW = 4096  # where the key is absent; null means no window


def build(config: ConfigReader) -> DecoderSpec:
    gqa, longest = read_gqa(config)
    if not config.is_null("sliding_window"):
        gqa = replace(gqa, window=config.integer("sliding_window", DEFAULT_WINDOW))
    mlp = read_mlp(config)
    return build_decoder(config, lambda layer: gqa, lambda layer: mlp, longest)


FAMILY = Family(("MistralForCausalLM",), (), build)
