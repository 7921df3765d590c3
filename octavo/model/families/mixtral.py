"""Mixtral: Mistral's attention, eight experts of which a token goes to two."""

from __future__ import annotations

from dataclasses import replace

from octavo.model.families.experts import GGUF_EXPERTS, one_by_one
from octavo.model.families.family import Family, build_decoder, read_gqa
from octavo.model.families.names import GGUF_NAMES, HF_NAMES
from octavo.model.families.reading import ConfigReader, read_norm
from octavo.model.families.routing import read_num_experts, read_router, read_silu
from octavo.model.spec import DecoderSpec, MoESpec


def build(config: ConfigReader) -> DecoderSpec:
    read_silu(config)
    gqa, longest = read_gqa(config)
    if config.has("sliding_window"):
        gqa = replace(gqa, window=config.integer("sliding_window"))
    router = read_router(config, read_num_experts(config))
    moe = MoESpec(router, config.integer("intermediate_size"))
    norm = read_norm(config, 1e-5)
    return build_decoder(config, lambda layer: gqa, lambda layer: moe, longest, norm=norm)


FAMILY = Family(
    ("MixtralForCausalLM",),
    ("llama with experts",),
    build,
    gguf_interleaves=True,
    hf_names={**HF_NAMES, "layers.{i}.router": "model.layers.{i}.block_sparse_moe.gate"},
    experts=(one_by_one("model.layers.{i}.block_sparse_moe.experts", "w1", "w3", "w2"),),
    gguf_names={**GGUF_NAMES, "layers.{i}.router": "blk.{i}.ffn_gate_inp"},
    gguf_experts=GGUF_EXPERTS,
)
