"""OPT: learned positions two rows into their table, layer norms before or (350m) after each sum, an
embedding that may be narrower than the layers."""

from __future__ import annotations

from octavo.model.families.family import Family, build_decoder, read_mha
from octavo.model.families.reading import ConfigReader, read_activation
from octavo.model.spec import (
    DecoderSpec,
    EmbeddingSpec,
    LayerNormSpec,
    PlainMLPSpec,
    PositionsSpec,
    ResidualSpec,
)

OFFSET = 2  # rows that fairseq kept for padding
_LAYER = "model.decoder.layers.{i}."
NAMES = {
    "embed": "model.decoder.embed_tokens",
    "embed_in": "model.decoder.project_in",
    "embed_out": "model.decoder.project_out",
    "positions": "model.decoder.embed_positions",
    "norm": "model.decoder.final_layer_norm",
    "head": "lm_head",
    **dict.fromkeys(
        ("layers.{i}.input_norm", "layers.{i}.mixer_outer_norm"), _LAYER + "self_attn_layer_norm"
    ),
    **dict.fromkeys(
        ("layers.{i}.post_norm", "layers.{i}.mlp_outer_norm"), _LAYER + "final_layer_norm"
    ),
    "layers.{i}.q": _LAYER + "self_attn.q_proj",
    "layers.{i}.k": _LAYER + "self_attn.k_proj",
    "layers.{i}.v": _LAYER + "self_attn.v_proj",
    "layers.{i}.o": _LAYER + "self_attn.out_proj",
    "layers.{i}.up": _LAYER + "fc1",
    "layers.{i}.down": _LAYER + "fc2",
}


def build(config: ConfigReader) -> DecoderSpec:
    config.absent("layer_norm_elementwise_affine", True)
    bias = config.boolean("enable_bias", True)
    gqa, longest = read_mha(config, bias)
    activation = read_activation(config, "activation_function", "relu")
    mlp = PlainMLPSpec(config.integer("ffn_dim"), activation, bias)
    norm, first = LayerNormSpec(1e-5), config.boolean("do_layer_norm_before", True)
    return build_decoder(
        config,
        lambda layer: gqa,
        lambda layer: mlp,
        longest,
        norm=norm,
        final_norm=first and not config.boolean("_remove_final_layer_norm", False),
        around=ResidualSpec(before=norm) if first else ResidualSpec(outer=norm),
        embedding=EmbeddingSpec(
            config.integer("word_embed_proj_dim", config.integer("hidden_size")),
            config.boolean("tie_word_embeddings", True),
            positions=PositionsSpec(longest + OFFSET, OFFSET),
        ),
    )


FAMILY = Family(("OPTForCausalLM",), (), build, hf_names=NAMES)
