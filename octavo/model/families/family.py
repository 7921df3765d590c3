"""What a family is: architectures' names, a config reader, and where its tensors are stored."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from octavo.model.families.experts import ExpertLayout
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
    RMSNormSpec,
    RopeSpec,
)


@dataclass(frozen=True)
class Family:
    """``gguf_interleaves``: the GGUF converter reorders q and k rows from halves (i, i + d/2) to
    neighbours (2i, 2i + 1); the loader puts them back. ``base``: what a checkpoint's names begin
    with, but for the head's; a model that was saved without its head lacks it. ``from_gguf``
    completes a config made of GGUF metadata with what llama.cpp knows without being told.
    ``experts``, ``gguf_experts``: the ways in which files store them."""

    architectures: tuple[str, ...]
    gguf_architectures: tuple[str, ...]
    build: Callable[[ConfigReader], DecoderSpec]
    gguf_interleaves: bool = False
    hf_names: Names = field(default_factory=lambda: HF_NAMES)
    gguf_names: Names = field(default_factory=lambda: GGUF_NAMES)
    base: str = "model."
    from_gguf: Callable[[dict[str, Any]], dict[str, Any]] = dict
    experts: tuple[ExpertLayout, ...] = ()
    gguf_experts: tuple[ExpertLayout, ...] = ()


def build_decoder(
    config: ConfigReader,
    mixer: Callable[[int], MixerSpec],
    mlp: Callable[[int], FeedForwardSpec],
    longest: int,
    *,
    norm: NormSpec | None = None,
    around: ResidualSpec | None = None,
    final_norm: bool = True,
    embedding: EmbeddingSpec | None = None,
    logit_scale: float = 1.0,
    logit_softcap: float | None = None,
) -> DecoderSpec:
    """A decoder of layers whose ``mixer`` and ``mlp`` are given by their index. ``longest``: the
    longest context. ``norm``: before the head, and by default before each part (None: RMS)."""
    norm = norm or read_norm(config)
    around = around or ResidualSpec(before=norm)
    return DecoderSpec(
        architecture=str(config.values["architectures"][0]),
        vocab_size=config.integer("vocab_size"),
        hidden_size=config.integer("hidden_size"),
        embedding=embedding or read_embedding(config),
        layers=tuple(
            LayerSpec(mixer(layer), mlp(layer), around, around)
            for layer in range(config.count("num_hidden_layers"))
        ),
        norm=norm if final_norm else None,
        max_position=longest,
        logit_scale=logit_scale,
        logit_softcap=logit_softcap,
    )


def read_embedding(config: ConfigReader, tied: bool = False) -> EmbeddingSpec:
    """``tied``: what the family does where the config does not say."""
    return EmbeddingSpec(config.integer("hidden_size"), config.boolean("tie_word_embeddings", tied))


def no_rope(config: ConfigReader, head_dim: int) -> tuple[None, int]:
    return None, config.integer("max_position_embeddings")


def read_gqa(
    config: ConfigReader,
    *,
    head_dim: int | None = None,
    rope: Callable[[ConfigReader, int], tuple[RopeSpec | None, int]] = read_rope,
    qkv_bias: bool = False,
    out_bias: bool = False,
    qk_norm: RMSNormSpec | None = None,
) -> tuple[GQASpec, int]:
    """Grouped-query attention without a window, and the longest context. ``head_dim`` is the
    family's default; None: hidden / heads. ``rope`` reads the rope and that length."""
    heads = config.integer("num_attention_heads")
    dim = read_head_dim(config, heads, head_dim)
    turning, longest = rope(config, dim)
    return (
        GQASpec(
            num_heads=heads,
            num_kv_heads=read_kv_heads(config, heads),
            head_dim=dim,
            rope=turning,
            qkv_bias=qkv_bias,
            out_bias=out_bias,
            qk_norm=qk_norm,
        ),
        longest,
    )


def read_mha(config: ConfigReader, bias: bool) -> tuple[GQASpec, int]:
    """As many heads of k and v as of q, no rope; the longest context is that of the positions."""
    gqa, longest = read_gqa(config, rope=no_rope, qkv_bias=bias, out_bias=bias)
    return replace(gqa, num_kv_heads=gqa.num_heads), longest


def read_mlp(config: ConfigReader, bias: bool = False) -> MLPSpec:
    return MLPSpec(config.integer("intermediate_size"), bias, read_activation(config))
