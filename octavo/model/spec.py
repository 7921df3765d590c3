"""A model as data: what a family's config.json says, in one small vocabulary. Never imports torch.

A decoder is, per layer, ``x += mixer(norm(x))`` and ``x += mlp(norm(x))``, with norms where a
family has them. The kinds of norm, mixer, MLP and rope scaling are tagged unions: a new idea is a
new part with a file of its own, and a field enters an existing part only when a second family needs
it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from octavo.ops.routing import Routing


@dataclass(frozen=True)
class RMSNormSpec:
    """x / sqrt(mean(x^2) + eps) * weight (Zhang & Sennrich 2019)."""

    eps: float


@dataclass(frozen=True)
class LayerNormSpec:
    """(x - mean(x)) / sqrt(var(x) + eps) * weight + bias (Ba et al. 2016)."""

    eps: float


NormSpec = RMSNormSpec | LayerNormSpec


@dataclass(frozen=True)
class ResidualSpec:
    """The way around a mixer or an MLP ``f``: x becomes outer(x + scale * after(f(before(x)))).

    Llama has ``before`` alone, Gemma 2 ``before`` and ``after``, OLMo 2 ``after``, the transformer
    of 2017 ``outer``; Granite (and MiniCPM) scale.
    """

    before: NormSpec | None = None
    after: NormSpec | None = None
    outer: NormSpec | None = None
    scale: float = 1.0

    @property
    def is_plain(self) -> bool:
        """Whether nothing stands between ``f`` and the sum."""
        return self.after is None and self.scale == 1.0


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


@dataclass(frozen=True)
class LongRopeScaling:
    """Each frequency divided by a factor of its own: one of ``short`` in a context of up to
    ``original`` positions, of ``long`` beyond (Ding et al. 2024). ``attention_factor`` multiplies
    cos and sin."""

    short: tuple[float, ...]
    long: tuple[float, ...]
    original: int
    attention_factor: float


RopeScaling = (
    LinearScaling | DynamicScaling | Llama3Scaling | YarnScaling | LongRopeScaling | TensorScaling
)
# With these a token turns by the length that its context has in the step that computes it.
BY_LENGTH = (DynamicScaling, LongRopeScaling)


@dataclass(frozen=True)
class RopeSpec:
    """Rotary embedding, halves paired: of the first ``dim`` numbers of a head, i and i + dim / 2
    turn together. ``dim``: None: of all of them. The loader moves the rows of q and k so that pairs
    are (i, i + head_dim / 2), as kernels want them, and the others are multiplied by 1."""

    theta: float
    scaling: RopeScaling | None = None
    dim: int | None = None


@dataclass(frozen=True)
class GQASpec:
    """Grouped-query attention. ``rope``: None: heads do not turn. ``window``: keys a token sees,
    itself included; None: all. ``scale``: of the scores; None: 1 / sqrt(head_dim). ``softcap``:
    scores s become softcap * tanh(s / softcap). ``qk_norm_over``: a norm of q and k takes each head
    by itself, or the projection whole. ``sinks``: each head has one more score, of nothing."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: RopeSpec | None
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: RMSNormSpec | None = None
    qk_norm_over: Literal["head", "projection"] = "head"
    window: int | None = None
    scale: float | None = None
    softcap: float | None = None
    sinks: bool = False


Activation = Literal["silu", "gelu", "gelu_tanh", "relu"]


@dataclass(frozen=True)
class MLASpec:
    """Multi-head latent attention: keys and values of all heads are projections of one latent of
    ``latent_dim`` numbers, beside one rotated key of ``rope_dim`` that the heads share.

    ``nope_dim``, ``rope_dim``: the parts of a query head without and with RoPE, whose pairs are
    (2i, 2i + 1) where ``interleaved``. ``query_rank``: of the latent that queries are projected
    from; None: they are projected from the layer's input. ``norm``: of the latents. ``scale``: of
    the scores.
    """

    num_heads: int
    latent_dim: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    query_rank: int | None
    rope: RopeSpec
    norm: RMSNormSpec
    scale: float
    interleaved: bool


@dataclass(frozen=True)
class MLPSpec:
    """down(activation(gate(x)) * up(x))."""

    intermediate_size: int
    bias: bool = False
    activation: Activation = "silu"


@dataclass(frozen=True)
class PlainMLPSpec:
    """down(activation(up(x)))."""

    intermediate_size: int
    activation: Activation
    bias: bool = False


@dataclass(frozen=True)
class RouterSpec(Routing):
    """How a token's experts are chosen and weighed. ``bias``: the logits have one. ``corrected``: a
    number per expert is added to the scores for the choice alone."""

    bias: bool = False
    corrected: bool = False


@dataclass(frozen=True)
class MoESpec:
    """Mixture of experts: weight * down(activation(gate(x), up(x))), summed over the chosen ones.
    ``shared``: an MLP that every token goes through besides, times sigmoid(w x) if
    ``shared_gate``."""

    router: RouterSpec
    intermediate_size: int
    activation: Literal["silu_mul", "swiglu_clamped"] = "silu_mul"
    bias: bool = False
    shared: MLPSpec | None = None
    shared_gate: bool = False


MixerSpec = GQASpec | MLASpec
FeedForwardSpec = MLPSpec | PlainMLPSpec | MoESpec


@dataclass(frozen=True)
class LayerSpec:
    mixer: MixerSpec
    mlp: FeedForwardSpec
    around_mixer: ResidualSpec
    around_mlp: ResidualSpec


@dataclass(frozen=True)
class PositionsSpec:
    """Learned positions: row position + ``offset`` of a table of ``rows`` is added to a token's
    embedding."""

    rows: int
    offset: int = 0


@dataclass(frozen=True)
class EmbeddingSpec:
    """What a token becomes: scale * its row of ``width`` numbers, projected to the hidden size
    where that is another (the head projects back), plus its position's row. ``tied``: the head has
    the same weight. ``scale`` is rounded to the model's dtype first, as Gemma's is."""

    width: int
    tied: bool
    scale: float | None = None
    positions: PositionsSpec | None = None


@dataclass(frozen=True)
class DecoderSpec:
    """``norm``: before the head; None: there is none. ``max_position``: the longest context the
    positions support, a rope's scaling included. ``logit_scale`` multiplies logits; with
    ``logit_softcap`` logits z become softcap * tanh(z / softcap). ``draft_layers``: layers that a
    checkpoint holds after these to predict further tokens, which are not loaded."""

    architecture: str
    vocab_size: int
    hidden_size: int
    embedding: EmbeddingSpec
    layers: tuple[LayerSpec, ...]
    norm: NormSpec | None
    max_position: int
    logit_scale: float = 1.0
    logit_softcap: float | None = None
    draft_layers: int = 0
