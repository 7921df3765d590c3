"""Mistral: Llama's shape with a sliding window and a head size of its own. GGUF calls it llama."""

from __future__ import annotations

from octavo.model.families.family import Family, build_decoder
from octavo.model.families.reading import ConfigReader
from octavo.model.spec import DecoderSpec

DEFAULT_WINDOW = 4096  # where the key is absent; null means no window


def build(config: ConfigReader) -> DecoderSpec:
    if config.has("sliding_window") or "sliding_window" not in config.values:
        window = config.integer("sliding_window", DEFAULT_WINDOW)
    else:
        window = None
    return build_decoder(config, window=lambda layer: window)


FAMILY = Family(("MistralForCausalLM",), (), build)
