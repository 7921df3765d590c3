"""Gemma: a scaled embedding, GELU, norms whose weights are stored less 1, and a tied head."""

from __future__ import annotations

from octavo.model.families.family import Family, build_decoder, read_gqa
from octavo.model.families.names import HF_NAMES, Names, Place
from octavo.model.families.reading import ConfigReader, read_activation
from octavo.model.spec import DecoderSpec, EmbeddingSpec, MLPSpec


def less_one(names: Names) -> dict[str, str | Place]:
    """``names`` with norms that are stored less 1. A GGUF file has them whole."""
    return {
        key: Place(name, plus=1.0) if key.endswith("norm") and isinstance(name, str) else name
        for key, name in names.items()
    }


def read_attention_bias(config: ConfigReader) -> bool:
    config.absent("use_bidirectional_attention", False)
    return config.boolean("attention_bias", False)


def read_gemma_embedding(config: ConfigReader) -> EmbeddingSpec:
    hidden = config.integer("hidden_size")
    tied = config.boolean("tie_word_embeddings", True)
    return EmbeddingSpec(hidden, tied, scale=hidden**0.5)


def build(config: ConfigReader) -> DecoderSpec:
    bias = read_attention_bias(config)
    gqa, longest = read_gqa(config, head_dim=256, qkv_bias=bias, out_bias=bias)
    key = "hidden_activation" if config.has("hidden_activation") else "hidden_act"
    activation = read_activation(config, key, "gelu_pytorch_tanh")
    if activation == "gelu":  # what the first checkpoints say and do not mean
        activation = "gelu_tanh"
    mlp = MLPSpec(config.integer("intermediate_size"), activation=activation)
    return build_decoder(
        config,
        lambda layer: gqa,
        lambda layer: mlp,
        longest,
        embedding=read_gemma_embedding(config),
    )


FAMILY = Family(("GemmaForCausalLM",), ("gemma",), build, hf_names=less_one(HF_NAMES))
