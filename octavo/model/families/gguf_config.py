"""GGUF metadata in the words of a config.json, so that a family reads both alike."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from octavo.model.families.catalogue import family_of_gguf
from octavo.model.families.reading import ConfigReader
from octavo.types import ConfigError

# config.json key -> metadata key after the architecture's name. A family reads those that it has.
_KEYS = {
    "hidden_size": "embedding_length",
    "num_hidden_layers": "block_count",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "max_position_embeddings": "context_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "layer_norm_epsilon": "attention.layer_norm_epsilon",
    "rope_theta": "rope.freq_base",
    "rope_local_base_freq": "rope.freq_base_swa",
    "rope_finetuned": "rope.scaling.finetuned",
    "head_dim": "attention.key_length",
    "num_local_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "attention_multiplier": "attention.scale",
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "logits_scaling": "logit_scale",
}
# Of a single value each, as those of _KEYS. What llama.cpp has for each layer is refused.
_SINGLE = (
    *_KEYS.values(),
    *("rope.dimension_count", "rope.scale_linear", "rope.scaling.factor"),
    *("rope.scaling.attn_factor", "rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow"),
    *("rope.scaling.original_context_length", "attention.sliding_window"),
)
# What would change the maths and is read by no family -> the value with which it does not.
_NEUTRAL = {
    "attention.causal": True,
    "attention.clamp_kqv": 0.0,
    "attention.max_alibi_bias": 0.0,
    "rope.scaling.yarn_attn_factor": 1.0,
    "rope.scaling.yarn_ext_factor": 1.0,
    "rope.scaling.yarn_log_multiplier": 0.0,
}
_LONG, _SHORT = "rope_factors_long.weight", "rope_factors_short.weight"


def config_from_gguf(
    metadata: Mapping[str, Any],
    tensor_shapes: Mapping[str, Collection[int]],
    vector: Callable[[str], list[float]],
    where: str,
) -> dict[str, Any]:
    """``tensor_shapes``: name -> row-major shape of every tensor. ``vector``: reads a small one of
    FP32. Raises ConfigError for a file that is no language model of a supported kind."""
    arch = metadata.get("general.architecture")
    if not isinstance(arch, str):
        raise ConfigError(f"{where}: general.architecture is missing; this GGUF holds no model")
    if "token_embd.weight" not in tensor_shapes:
        raise ConfigError(f"{where}: token_embd.weight is missing; this GGUF holds no weights")
    _check(metadata, arch, where)
    count = metadata.get(f"{arch}.expert_count") or 0
    family = family_of_gguf("llama with experts" if arch == "llama" and count else arch, where)
    if count and not family.gguf_experts:
        raise ConfigError(
            f"{where}: {arch}.expert_count is {count}; this version reads experts from GGUF files "
            "of llama (Mixtral) and qwen3moe alone"
        )
    config: dict[str, Any] = {"architectures": [family.architectures[0]]}
    for key, suffix in _KEYS.items():
        value = metadata.get(f"{arch}.{suffix}")
        if value is not None:
            config[key] = value
    config.update(_windows(metadata, arch, where))
    config.update(_head_sizes(metadata, arch, config, tensor_shapes))
    config["vocab_size"] = next(iter(tensor_shapes["token_embd.weight"]))
    config["tie_word_embeddings"] = "output.weight" not in tensor_shapes
    config["attention_bias"] = "blk.0.attn_q.bias" in tensor_shapes
    config["mlp_bias"] = "blk.0.ffn_gate.bias" in tensor_shapes
    config["rope_scaling"] = _rope_scaling(metadata, arch, tensor_shapes, vector, where)
    if config["rope_scaling"] and config["rope_scaling"].get("rope_type") in ("linear", "yarn"):
        original = config["rope_scaling"].get("original_max_position_embeddings")
        if original:  # GGUF counts the scaled context, a config.json with these types does not
            config["max_position_embeddings"] = original
    for key, name in (("bos_token_id", "bos"), ("eos_token_id", "eos")):
        value = metadata.get(f"tokenizer.ggml.{name}_token_id")
        if value is not None:
            config[key] = value
    return family.from_gguf(config)


def _check(metadata: Mapping[str, Any], arch: str, where: str) -> None:
    """Raises ConfigError where a single number is something else, and for what is not computed."""
    for key in _SINGLE:
        value = metadata.get(f"{arch}.{key}")
        if value is not None and not isinstance(value, (int, float)):
            several = (
                "has a value for each layer" if not isinstance(value, str) else f"is {value!r}"
            )
            raise ConfigError(f"{where}: {arch}.{key} {several}; this version supports one number")
    for key, neutral in _NEUTRAL.items():
        _check_neutral(metadata, f"{arch}.{key}", neutral, where)


def _check_neutral(metadata: Mapping[str, Any], key: str, neutral: object, where: str) -> None:
    value = metadata.get(key, neutral)
    if not isinstance(value, (int, float)) or value != neutral:
        raise ConfigError(f"{where}: {key} is {value!r}; this version supports {neutral!r}")


def _windows(metadata: Mapping[str, Any], arch: str, where: str) -> dict[str, Any]:
    """The window, 0 for none; which layers have it, as a flag for each or as a period, whose last
    layer has none."""
    window = metadata.get(f"{arch}.attention.sliding_window") or None
    pattern = metadata.get(f"{arch}.attention.sliding_window_pattern")
    found: dict[str, Any] = {"sliding_window": window}
    if pattern is None or window is None:
        return found
    if isinstance(pattern, (str, float)):
        raise ConfigError(
            f"{where}: {arch}.attention.sliding_window_pattern is {pattern!r}; this version "
            "supports a period or a flag for each layer"
        )
    layers = {"num_hidden_layers": metadata.get(f"{arch}.block_count")}
    count = ConfigReader(layers, where, {"num_hidden_layers": f"{arch}.block_count"}).count(
        "num_hidden_layers"
    )
    if isinstance(pattern, int):
        slides = [layer % pattern < pattern - 1 if pattern else True for layer in range(count)]
    elif len(pattern) == count:
        slides = [bool(flag) for flag in pattern]
    else:
        raise ConfigError(
            f"{where}: {arch}.attention.sliding_window_pattern has {len(pattern)} entries, the "
            f"model {count} layers"
        )
    found["layer_types"] = ["sliding_attention" if s else "full_attention" for s in slides]
    return found


def _head_sizes(
    metadata: Mapping[str, Any],
    arch: str,
    config: Mapping[str, Any],
    tensor_shapes: Mapping[str, Collection[int]],
) -> dict[str, Any]:
    """A head's size where only q's rows tell, and how much of it turns where that is not all."""
    dim = metadata.get(f"{arch}.rope.dimension_count")
    heads, head_dim = config.get("num_attention_heads"), config.get("head_dim")
    if not heads:
        return {}
    found: dict[str, Any] = {}
    if not head_dim and "blk.0.attn_q.weight" in tensor_shapes:
        head_dim = found["head_dim"] = next(iter(tensor_shapes["blk.0.attn_q.weight"])) // heads
    head_dim = head_dim or config.get("hidden_size", 0) // heads
    if dim and head_dim and dim != head_dim:
        found["partial_rotary_factor"] = (dim + 0.01) / head_dim  # times head_dim, cut: dim
    return found


def _rope_scaling(
    metadata: Mapping[str, Any],
    arch: str,
    tensor_shapes: Mapping[str, Collection[int]],
    vector: Callable[[str], list[float]],
    where: str,
) -> dict[str, Any] | None:
    """As a config.json has it. A file that gives a factor and no type means linear, as in
    llama.cpp; those of 2023 have the factor under another key."""
    prefix = f"{arch}.rope.scaling."
    factor = metadata.get(prefix + "factor") or metadata.get(f"{arch}.rope.scale_linear")
    kind = metadata.get(prefix + "type", "linear" if factor else "none")
    if not isinstance(kind, str):
        raise ConfigError(f"{where}: {prefix}type is no name but a {type(kind).__name__}")
    original = metadata.get(prefix + "original_context_length")
    if (_LONG in tensor_shapes) != (_SHORT in tensor_shapes):
        there, absent = (_LONG, _SHORT) if _LONG in tensor_shapes else (_SHORT, _LONG)
        raise ConfigError(
            f"{where}: {there} is there, {absent} is missing; convert the model again"
        )
    if _LONG in tensor_shapes and _SHORT in tensor_shapes:
        return {
            "rope_type": "longrope",
            "long_factor": vector(_LONG),
            "short_factor": vector(_SHORT),
            "original_max_position_embeddings": original,
            "attention_factor": metadata.get(prefix + "attn_factor"),
        }
    _check_neutral(metadata, prefix + "attn_factor", 1.0, where)
    if "rope_freqs.weight" in tensor_shapes:
        return {"rope_type": "gguf_tensor"}
    if kind == "none":
        return None
    return {
        "rope_type": kind,
        "factor": factor,
        "original_max_position_embeddings": original or None,
        "beta_fast": metadata.get(prefix + "yarn_beta_fast"),
        "beta_slow": metadata.get(prefix + "yarn_beta_slow"),
    }
