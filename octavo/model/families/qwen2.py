"""Qwen2 and Qwen2.5: biases on q, k and v; a sliding window on the upper layers if switched on."""

from __future__ import annotations

from dataclasses import replace

from octavo.model.families.family import Family, build_decoder, read_gqa, read_mlp
from octavo.model.families.reading import ConfigReader, read_windows
from octavo.model.spec import DecoderSpec


def windows_of(config: ConfigReader) -> list[int | None]:
    """``use_sliding_window``: layers from ``max_window_layers`` on get ``sliding_window``."""
    window = config.integer("sliding_window", 4096)
    if not config.boolean("use_sliding_window", False) or config.is_null("sliding_window"):
        return [None] * config.count("num_hidden_layers")
    first = config.integer("max_window_layers", 28, low=0)
    return read_windows(config, window, lambda layer: layer >= first)


def build(config: ConfigReader) -> DecoderSpec:
    gqa, longest = read_gqa(config, qkv_bias=True)
    windows, mlp = windows_of(config), read_mlp(config)
    return build_decoder(
        config, lambda layer: replace(gqa, window=windows[layer]), lambda layer: mlp, longest
    )


FAMILY = Family(("Qwen2ForCausalLM",), ("qwen2",), build)
