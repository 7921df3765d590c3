"""GPT-2: learned positions, layer norms, an MLP without a gate; matrices stored as [in, out]."""

from __future__ import annotations

from dataclasses import replace

from octavo.model.families.family import (
    Family,
    build_decoder,
    read_embedding,
    read_mha,
)
from octavo.model.families.names import GGUF_NAMES, Names, Place
from octavo.model.families.phi3 import fused
from octavo.model.families.reading import ConfigReader, read_activation
from octavo.model.spec import (
    DecoderSpec,
    LayerNormSpec,
    PlainMLPSpec,
    PositionsSpec,
)

KEYS = {
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "max_position_embeddings": "n_positions",
    "intermediate_size": "n_inner",
}
_QKV = Place("transformer.h.{i}.attn.c_attn", transposed=True)
NAMES: Names = {
    "embed": "transformer.wte",
    "positions": "transformer.wpe",
    "norm": "transformer.ln_f",
    "head": "lm_head",
    "layers.{i}.input_norm": "transformer.h.{i}.ln_1",
    "layers.{i}.post_norm": "transformer.h.{i}.ln_2",
    **dict.fromkeys(("layers.{i}.q", "layers.{i}.k", "layers.{i}.v"), _QKV),
    "layers.{i}.o": Place("transformer.h.{i}.attn.c_proj", transposed=True),
    "layers.{i}.up": Place("transformer.h.{i}.mlp.c_fc", transposed=True),
    "layers.{i}.down": Place("transformer.h.{i}.mlp.c_proj", transposed=True),
}


def build(config: ConfigReader) -> DecoderSpec:
    config = config.renamed(KEYS)
    config.absent("add_cross_attention", False)
    gqa, longest = read_mha(config, bias=True)
    norm = LayerNormSpec(config.number("layer_norm_epsilon", 1e-5))
    scale = gqa.head_dim**-0.5 if config.boolean("scale_attn_weights", True) else 1.0
    by_layer = config.boolean("scale_attn_by_inverse_layer_idx", False)
    activation = read_activation(config, "activation_function", "gelu_new")
    inner = config.integer("intermediate_size", 4 * config.integer("hidden_size"))
    mlp = PlainMLPSpec(inner, activation, bias=True)
    return build_decoder(
        config,
        lambda layer: replace(gqa, scale=scale / (layer + 1) if by_layer else scale),
        lambda layer: mlp,
        longest,
        norm=norm,
        embedding=replace(read_embedding(config, tied=True), positions=PositionsSpec(longest)),
    )


FAMILY = Family(
    ("GPT2LMHeadModel",),
    ("gpt2",),
    build,
    hf_names=NAMES,
    gguf_names={
        **fused(GGUF_NAMES, "blk.{i}.attn_qkv", "blk.{i}.ffn_up"),
        "positions": "position_embd",
    },
    base="transformer.",
)
