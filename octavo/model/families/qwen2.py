"""Qwen2 and Qwen2.5: biases on q, k and v; a sliding window on the upper layers if switched on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from octavo.model.families.family import Family, build_decoder, read_gqa, read_mlp
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
    gqa, longest = read_gqa(config, qkv_bias=True)
    window, mlp = window_of(config), read_mlp(config)
    return build_decoder(
        config, lambda layer: replace(gqa, window=window(layer)), lambda layer: mlp, longest
    )


FAMILY = Family(("Qwen2ForCausalLM",), ("qwen2",), build)
