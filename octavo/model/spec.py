"""A model as data: what a family's config.json says, in one small vocabulary. Never imports torch.

A decoder is, per layer, ``x += mixer(norm(x))`` and ``x += mlp(norm(x))``. The kinds of mixer, MLP
and rope scaling are tagged unions: a new idea becomes a new part with a file of its own, and a
field enters an existing part only when a second family needs it.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class NormSpec:
    """RMS norm: x / sqrt(mean(x^2) + eps) * weight (Zhang & Sennrich 2019)."""

    eps: float


@dataclass(frozen=True)
class LinearScaling:
    """Positions divided by ``factor``."""

    factor: float


@dataclass(frozen=True)
class DynamicScaling:
    """NTK-aware base that grows with the context once it exceeds ``original`` positions."""

    factor: float
    original: int


@dataclass(frozen=True)
class Llama3Scaling:
    """Low frequencies divided by ``factor``, high ones kept, a smooth ramp between."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original: int


@dataclass(frozen=True)
class YarnScaling:
    """YaRN (Peng et al. 2023). ``attention_factor`` multiplies cos and sin."""

    factor: float
    original: int
    beta_fast: float
    beta_slow: float
    attention_factor: float
    truncate: bool


@dataclass(frozen=True)
class TensorScaling:
    """Each frequency divided by an entry of a checkpoint tensor (GGUF's ``rope_freqs.weight``)."""


RopeScaling = LinearScaling | DynamicScaling | Llama3Scaling | YarnScaling | TensorScaling


@dataclass(frozen=True)
class RopeSpec:
    """Rotary embedding over the whole head, halves paired (i, i + d/2)."""

    theta: float
    scaling: RopeScaling | None = None


@dataclass(frozen=True)
class GQASpec:
    """Grouped-query attention. ``window``: keys a token sees, itself included; None: all."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: RopeSpec
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: NormSpec | None = None
    window: int | None = None


@dataclass(frozen=True)
class MLPSpec:
    """down(silu(gate(x)) * up(x))."""

    intermediate_size: int
    bias: bool = False


MixerSpec = GQASpec
FeedForwardSpec = MLPSpec


@dataclass(frozen=True)
class LayerSpec:
    mixer: MixerSpec
    mlp: FeedForwardSpec
    norm: NormSpec


@dataclass(frozen=True)
class DecoderSpec:
    """``max_position``: the longest context the rope supports, its scaling included."""

    architecture: str
    vocab_size: int
    hidden_size: int
    layers: tuple[LayerSpec, ...]
    norm: NormSpec
    max_position: int
    tied_embeddings: bool
