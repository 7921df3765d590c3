"""GGUF metadata in the words of a config.json, so that a family reads both alike."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from octavo.model.families.catalogue import architecture_of_gguf
from octavo.types import ConfigError

# config.json key -> metadata key after the architecture's name.
_KEYS = {
    "hidden_size": "embedding_length",
    "num_hidden_layers": "block_count",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "max_position_embeddings": "context_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "rope_theta": "rope.freq_base",
    "head_dim": "attention.key_length",
}


def config_from_gguf(
    metadata: Mapping[str, Any], tensor_shapes: Mapping[str, Collection[int]], where: str
) -> dict[str, Any]:
    """``tensor_shapes``: name -> row-major shape of every tensor. Raises ConfigError for a file
    that is no language model of a supported kind."""
    arch = metadata.get("general.architecture")
    if not isinstance(arch, str):
        raise ConfigError(f"{where}: general.architecture is missing; this GGUF holds no model")
    if "token_embd.weight" not in tensor_shapes:
        raise ConfigError(f"{where}: token_embd.weight is missing; this GGUF holds no weights")
    config: dict[str, Any] = {"architectures": [architecture_of_gguf(arch, where)]}
    for key, suffix in _KEYS.items():
        value = metadata.get(f"{arch}.{suffix}")
        if value is not None:
            config[key] = value
    if "head_dim" not in config and f"{arch}.rope.dimension_count" in metadata:
        config["head_dim"] = metadata[f"{arch}.rope.dimension_count"]
    config["vocab_size"] = next(iter(tensor_shapes["token_embd.weight"]))
    config["tie_word_embeddings"] = "output.weight" not in tensor_shapes
    config["attention_bias"] = "blk.0.attn_q.bias" in tensor_shapes
    config["rope_scaling"] = _rope_scaling(metadata, arch, "rope_freqs.weight" in tensor_shapes)
    if config["rope_scaling"] and config["rope_scaling"].get("rope_type") in ("linear", "yarn"):
        original = config["rope_scaling"].get("original_max_position_embeddings")
        if original:  # GGUF counts the scaled context, a config.json with these types does not
            config["max_position_embeddings"] = original
    for key, name in (("bos_token_id", "bos"), ("eos_token_id", "eos")):
        value = metadata.get(f"tokenizer.ggml.{name}_token_id")
        if value is not None:
            config[key] = value
    return config


def _rope_scaling(metadata: Mapping[str, Any], arch: str, has_factors: bool) -> Any:
    prefix = f"{arch}.rope.scaling."
    kind = metadata.get(prefix + "type", "none")
    if has_factors:
        return {"rope_type": "gguf_tensor"}
    if kind == "none":
        return None
    scaling: dict[str, Any] = {"rope_type": kind, "factor": metadata.get(prefix + "factor")}
    if original := metadata.get(prefix + "original_context_length"):
        scaling["original_max_position_embeddings"] = original
    return scaling
