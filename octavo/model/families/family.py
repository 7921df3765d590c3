"""What a family is: architectures' names, a config reader, and where its tensors are stored."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from octavo.model.families.reading import (
    ConfigReader,
    read_activation,
    read_head_dim,
    read_kv_heads,
    read_norm,
    read_rope,
)
from octavo.model.spec import DecoderSpec, GQASpec, LayerSpec, MLPSpec

# Our parameter name -> its name in a checkpoint; {i} is the layer. ".weight" and ".bias" follow.
HF_NAMES = {
    "embed": "model.embed_tokens",
    "norm": "model.norm",
    "head": "lm_head",
    "layers.{i}.input_norm": "model.layers.{i}.input_layernorm",
    "layers.{i}.post_norm": "model.layers.{i}.post_attention_layernorm",
    "layers.{i}.q": "model.layers.{i}.self_attn.q_proj",
    "layers.{i}.k": "model.layers.{i}.self_attn.k_proj",
    "layers.{i}.v": "model.layers.{i}.self_attn.v_proj",
    "layers.{i}.o": "model.layers.{i}.self_attn.o_proj",
    "layers.{i}.q_norm": "model.layers.{i}.self_attn.q_norm",
    "layers.{i}.k_norm": "model.layers.{i}.self_attn.k_norm",
    "layers.{i}.gate": "model.layers.{i}.mlp.gate_proj",
    "layers.{i}.up": "model.layers.{i}.mlp.up_proj",
    "layers.{i}.down": "model.layers.{i}.mlp.down_proj",
}
GGUF_NAMES = {
    "embed": "token_embd",
    "norm": "output_norm",
    "head": "output",
    "rope_factors": "rope_freqs",
    "layers.{i}.input_norm": "blk.{i}.attn_norm",
    "layers.{i}.post_norm": "blk.{i}.ffn_norm",
    "layers.{i}.q": "blk.{i}.attn_q",
    "layers.{i}.k": "blk.{i}.attn_k",
    "layers.{i}.v": "blk.{i}.attn_v",
    "layers.{i}.o": "blk.{i}.attn_output",
    "layers.{i}.q_norm": "blk.{i}.attn_q_norm",
    "layers.{i}.k_norm": "blk.{i}.attn_k_norm",
    "layers.{i}.gate": "blk.{i}.ffn_gate",
    "layers.{i}.up": "blk.{i}.ffn_up",
    "layers.{i}.down": "blk.{i}.ffn_down",
}
# Stored by some exporters, computed here: nothing is lost by not reading them.
HARMLESS = (
    r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq",
    r"model\.rotary_emb\.inv_freq",
    r"model\.layers\.\d+\.self_attn\.(masked_bias|attn\.bias)",
)


@dataclass(frozen=True)
class Family:
    """``gguf_interleaves``: the GGUF converter reorders q and k rows from halves (i, i + d/2) to
    neighbours (2i, 2i + 1); the loader puts them back."""

    architectures: tuple[str, ...]
    gguf_architectures: tuple[str, ...]
    build: Callable[[ConfigReader], DecoderSpec]
    gguf_interleaves: bool = False
    hf_names: Mapping[str, str] = field(default_factory=lambda: HF_NAMES)
    gguf_names: Mapping[str, str] = field(default_factory=lambda: GGUF_NAMES)


def build_decoder(
    config: ConfigReader,
    *,
    qkv_bias: bool = False,
    out_bias: bool = False,
    mlp_bias: bool = False,
    qk_norm: bool = False,
    window: Callable[[int], int | None] = lambda layer: None,
    head_dim: int | None = None,
) -> DecoderSpec:
    """The decoder all families of today share: norm → GQA → norm → gated SiLU MLP.

    ``window(layer)`` gives a layer's sliding window; ``head_dim`` is the family's default.
    """
    read_activation(config)
    heads = config.integer("num_attention_heads")
    kv_heads = read_kv_heads(config, heads)
    dim = read_head_dim(config, heads) if head_dim is None else config.integer("head_dim", head_dim)
    rope, longest = read_rope(config, dim)
    norm = read_norm(config)
    mlp = MLPSpec(config.integer("intermediate_size"), mlp_bias)
    layers = tuple(
        LayerSpec(
            GQASpec(
                num_heads=heads,
                num_kv_heads=kv_heads,
                head_dim=dim,
                rope=rope,
                qkv_bias=qkv_bias,
                out_bias=out_bias,
                qk_norm=norm if qk_norm else None,
                window=window(layer),
            ),
            mlp,
            norm,
        )
        for layer in range(config.integer("num_hidden_layers"))
    )
    return DecoderSpec(
        architecture=str(config.values["architectures"][0]),
        vocab_size=config.integer("vocab_size"),
        hidden_size=config.integer("hidden_size"),
        layers=layers,
        norm=norm,
        max_position=longest,
        tied_embeddings=config.boolean("tie_word_embeddings", False),
    )
