"""What a family is: architectures' names, a config reader, and where its tensors are stored."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from octavo.model.families.names import GGUF_NAMES, HF_NAMES, Names
from octavo.model.families.reading import (
    ConfigReader,
    read_activation,
    read_head_dim,
    read_kv_heads,
    read_norm,
    read_rope,
)
from octavo.model.spec import (
    DecoderSpec,
    EmbeddingSpec,
    FeedForwardSpec,
    GQASpec,
    LayerSpec,
    MixerSpec,
    MLPSpec,
    NormSpec,
    ResidualSpec,
)


@dataclass(frozen=True)
class Family:
    """``gguf_interleaves``: the GGUF converter reorders q and k rows from halves (i, i + d/2) to
    neighbours (2i, 2i + 1); the loader puts them back. ``base``: what a checkpoint's names begin
    with, but for the head's; a model that was saved without its head lacks it."""

    architectures: tuple[str, ...]
    gguf_architectures: tuple[str, ...]
    build: Callable[[ConfigReader], DecoderSpec]
    gguf_interleaves: bool = False
    hf_names: Names = field(default_factory=lambda: HF_NAMES)
    gguf_names: Names = field(default_factory=lambda: GGUF_NAMES)
    base: str = "model."


def build_decoder(
    config: ConfigReader,
    mixer: Callable[[int], MixerSpec],
    mlp: Callable[[int], FeedForwardSpec],
    longest: int,
    *,
    norm: NormSpec | None = None,
    around: ResidualSpec | None = None,
    embedding: EmbeddingSpec | None = None,
    logit_softcap: float | None = None,
) -> DecoderSpec:
    """A decoder of layers whose ``mixer`` and ``mlp`` are given by their index. ``longest``: the
    longest context. By default one RMS norm before each part, ``norm`` at the end too, and a plain
    embedding."""
    norm = norm or read_norm(config)
    around = around or ResidualSpec(before=norm)
    return DecoderSpec(
        architecture=str(config.values["architectures"][0]),
        vocab_size=config.integer("vocab_size"),
        hidden_size=config.integer("hidden_size"),
        embedding=embedding or read_embedding(config),
        layers=tuple(
            LayerSpec(mixer(layer), mlp(layer), around, around)
            for layer in range(config.integer("num_hidden_layers"))
        ),
        norm=norm,
        max_position=longest,
        logit_softcap=logit_softcap,
    )


def read_embedding(config: ConfigReader, tied: bool = False) -> EmbeddingSpec:
    """``tied``: what the family does where the config does not say."""
    return EmbeddingSpec(config.integer("hidden_size"), config.boolean("tie_word_embeddings", tied))


def read_gqa(
    config: ConfigReader,
    *,
    head_dim: int | None = None,
    qkv_bias: bool = False,
    out_bias: bool = False,
    qk_norm: bool = False,
) -> tuple[GQASpec, int]:
    """Grouped-query attention with a rope, without a window, and the longest context. ``head_dim``
    is the family's default; None: hidden / heads."""
    heads = config.integer("num_attention_heads")
    dim = read_head_dim(config, heads) if head_dim is None else config.integer("head_dim", head_dim)
    rope, longest = read_rope(config, dim)
    return (
        GQASpec(
            num_heads=heads,
            num_kv_heads=read_kv_heads(config, heads),
            head_dim=dim,
            rope=rope,
            qkv_bias=qkv_bias,
            out_bias=out_bias,
            qk_norm=read_norm(config) if qk_norm else None,
        ),
        longest,
    )


def read_mlp(config: ConfigReader, bias: bool = False) -> MLPSpec:
    return MLPSpec(config.integer("intermediate_size"), bias, read_activation(config))
