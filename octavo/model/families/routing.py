"""What families with experts read alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from octavo.model.families.reading import ConfigReader
from octavo.model.spec import FeedForwardSpec, MLPSpec, MoESpec, RouterSpec


def read_num_experts(config: ConfigReader) -> int:
    """Repositories say ``num_experts`` or ``num_local_experts``, by family and age."""
    keys = [key for key in ("num_local_experts", "num_experts") if config.has(key)]
    counts = [config.count(key) for key in keys or ["num_experts"]]
    if counts[0] != counts[-1]:
        wanted = f"one value: {keys[0]} is {counts[0]}"
        raise config.error(keys[-1], counts[-1], wanted)
    return counts[0]


def read_silu(config: ConfigReader) -> None:
    """Experts multiply by SiLU alone ("swish" is its other name)."""
    config.choice("hidden_act", ("silu", "swish"), "silu")


def read_router(config: ConfigReader, num_experts: int, **others: Any) -> RouterSpec:
    """The router of ``num_experts_per_tok`` choices; ``others``: its fields that have a default.
    Raises ConfigError where its numbers do not fit together."""
    top_k = config.integer("num_experts_per_tok")
    groups, kept = others.get("groups", 1), others.get("groups_kept", 1)
    least = 2 if others.get("group_score") == "top2" and groups > 1 else 1
    size = num_experts // groups
    if num_experts % groups or size < least:
        wanted = f"a divisor of {num_experts} (experts)"
        raise config.error("n_group", groups, wanted + " that leaves two in each")
    if kept > groups:
        raise config.error("topk_group", kept, f"at most {groups} (n_group)")
    if top_k > size * kept:
        raise config.error("num_experts_per_tok", top_k, f"at most {size * kept} experts")
    return RouterSpec(num_experts, top_k, **others)


def read_qwen_router(config: ConfigReader) -> RouterSpec:
    renormalize = config.boolean("norm_topk_prob", False)
    return read_router(config, read_num_experts(config), renormalize=renormalize)


def read_sparse_layers(
    config: ConfigReader, mlp: MLPSpec, moe: MoESpec
) -> Callable[[int], FeedForwardSpec]:
    """Qwen's rule: experts in every ``decoder_sparse_step``-th layer that ``mlp_only_layers`` does
    not name."""
    step = config.integer("decoder_sparse_step", 1)
    dense = config.values.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(type(layer) is int for layer in dense):
        raise config.error("mlp_only_layers", dense, "a list of layers")
    return lambda layer: mlp if layer in dense or (layer + 1) % step else moe
