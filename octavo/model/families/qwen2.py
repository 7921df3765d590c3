"""Qwen2 and Qwen2.5: biases on q, k and v; a sliding window on the upper layers if switched on."""

from __future__ import annotations

from collections.abc import Callable

from octavo.model.families.family import Family, build_decoder
from octavo.model.families.reading import ConfigReader
from octavo.model.spec import DecoderSpec


def window_of(config: ConfigReader) -> Callable[[int], int | None]:
    """``use_sliding_window``: layers from ``max_window_layers`` on get ``sliding_window``."""
    if not config.boolean("use_sliding_window", False) or not config.has("sliding_window"):
        return lambda layer: None
    window = config.integer("sliding_window")
    first = config.integer("max_window_layers", 28, low=0)
    return lambda layer: window if layer >= first else None


def build(config: ConfigReader) -> DecoderSpec:
    return build_decoder(config, qkv_bias=True, window=window_of(config))


FAMILY = Family(("Qwen2ForCausalLM",), ("qwen2",), build)
