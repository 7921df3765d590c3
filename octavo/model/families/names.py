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
    ``layers.{i}.q``; a second number in a name is ``{e}``."""
    stem, _, suffix = name.rpartition(".")
    numbers = iter(zip("ie", re.findall(r"\.(\d+)\.", stem)))
    found = dict(numbers)
    for key, number in found.items():
        stem = stem.replace(f".{number}.", f".{{{key}}}.", 1)
    stored = names[stem]
    if isinstance(stored, str):
        stored = Place(stored)
    full = stored.name
    for key, number in found.items():
        full = full.replace(f"{{{key}}}", number)
    return replace(stored, name=f"{full}.{suffix}")


def place_of(name: str, names: Names) -> int:
    """How far down the map a parameter's entry stands: the order within a shared tensor."""
    stem = name.rpartition(".")[0]
    for key in "ie":
        stem = re.sub(r"\.\d+\.", f".{{{key}}}.", stem, count=1)
    return list(names).index(stem)


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
