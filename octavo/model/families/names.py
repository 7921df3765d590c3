"""Our parameters' names, and where checkpoints keep them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Place:
    """Where a parameter lies: ``name`` in a checkpoint, without its suffix.

    Parameters that share a stored tensor lie in it one after the other along its outputs, in the
    order of the map. ``transposed``: its matrix is kept as [in, out]. ``plus``: is added to what is
    stored.
    """

    name: str
    transposed: bool = False
    plus: float = 0.0


Names = Mapping[str, str | Place]


def find(name: str, names: Names) -> Place:
    """Where ``layers.3.q.weight`` lies, suffix included, by what ``names`` says of
    ``layers.{i}.q``, or, where the stored name has another suffix or none, of
    ``layers.{i}.q.weight``."""
    key, layer = _entry(name, names)
    stored = names[key]
    if isinstance(stored, str):
        stored = Place(stored)
    full = stored.name.replace("{i}", layer)
    suffix = name.rpartition(".")[2]
    return replace(stored, name=full if key.endswith(f".{suffix}") else f"{full}.{suffix}")


def place_of(name: str, names: Names) -> int:
    """How far down the map a parameter's entry stands: the order within a shared tensor."""
    return list(names).index(_entry(name, names)[0])


def _entry(name: str, names: Names) -> tuple[str, str]:
    """The key of ``names`` for a parameter's tensor, and its layer ("" where it has none)."""
    layer = re.match(r"layers\.(\d+)\.", name)
    key = name.replace(layer[0], "layers.{i}.", 1) if layer else name
    return key if key in names else key.rpartition(".")[0], layer[1] if layer else ""


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
    r"(transformer\.)?h\.\d+\.attn\.(masked_)?bias",
    r"rope_factors_(long|short)\.weight",  # of a GGUF file: read with its metadata
)
