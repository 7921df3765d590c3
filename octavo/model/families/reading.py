"""Typed reading of a config.json: every value is checked, and what we do not know is refused."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from octavo.model.spec import (
    Activation,
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    RMSNormSpec,
    RopeScaling,
    RopeSpec,
    TensorScaling,
    YarnScaling,
)
from octavo.types import ConfigError

_MISSING = object()
ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn")


class ConfigReader:
    """Reads one mapping of a config; ``where`` names it in errors."""

    def __init__(self, values: Mapping[str, Any], where: str = "config.json") -> None:
        self.values = values
        self.where = where

    def has(self, key: str) -> bool:
        return self.values.get(key) is not None

    def integer(self, key: str, default: Any = _MISSING, low: int = 1) -> int:
        value = self._get(key, default)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or value < low:
            raise self.error(key, value, f"an integer of at least {low}")
        return value

    def number(self, key: str, default: Any = _MISSING) -> float:
        value = self._get(key, default)
        good = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not good or not math.isfinite(value) or value <= 0:
            raise self.error(key, value, "a finite number above 0")
        return float(value)

    def boolean(self, key: str, default: Any = _MISSING) -> bool:
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise self.error(key, value, "true or false")
        return value

    def choice(self, key: str, allowed: Iterable[str], default: Any = _MISSING) -> str:
        value = self._get(key, default)
        names = list(allowed)
        if value not in names:
            raise self.error(key, value, "one of " + ", ".join(names))
        return str(value)

    def error(self, key: str, value: object, wanted: str) -> ConfigError:
        return ConfigError(f"{self.where}: {key} is {value!r}; this version supports {wanted}")

    def _get(self, key: str, default: Any) -> Any:
        value = self.values.get(key)
        if value is None:
            value = default
        if value is _MISSING:
            raise ConfigError(f"{self.where}: {key} is missing")
        return value


# What config.json calls an activation -> ours.
ACTIVATIONS: Mapping[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}


def read_activation(
    config: ConfigReader, key: str = "hidden_act", default: str = "silu"
) -> Activation:
    return ACTIVATIONS[config.choice(key, ACTIVATIONS, default)]


def read_norm(config: ConfigReader) -> RMSNormSpec:
    return RMSNormSpec(config.number("rms_norm_eps", 1e-6))


def read_head_dim(config: ConfigReader, num_heads: int) -> int:
    """``head_dim`` when given; else hidden / heads, rounded down as the checkpoints' code does."""
    hidden = config.integer("hidden_size")
    head_dim = config.integer("head_dim", hidden // num_heads)
    if head_dim % 2:
        raise config.error("head_dim", head_dim, "an even number (rotary pairs)")
    return head_dim


def read_kv_heads(config: ConfigReader, num_heads: int) -> int:
    count = config.integer("num_key_value_heads", num_heads)
    if num_heads % count:
        raise config.error("num_key_value_heads", count, f"a divisor of {num_heads} (heads)")
    return count


def read_rope(config: ConfigReader, head_dim: int) -> tuple[RopeSpec, int]:
    """The rope and the longest context it supports.

    Reads ``rope_theta`` and ``rope_scaling`` (``type`` or ``rope_type``), or the newer
    ``rope_parameters`` that holds both.
    """
    nested = config.values.get("rope_parameters") or {}
    raw = config.values.get("rope_scaling") or nested
    for key, value in (("rope_scaling", raw), ("rope_parameters", nested)):
        if not isinstance(value, Mapping):
            raise config.error(key, value, "null or a JSON object")
    theta = ConfigReader({**config.values, **nested}, config.where).number("rope_theta", 10000.0)
    if float(config.values.get("partial_rotary_factor") or 1.0) != 1.0:
        raise config.error("partial_rotary_factor", config.values["partial_rotary_factor"], "1.0")
    longest = config.integer("max_position_embeddings")
    scaling, longest = _read_scaling(raw, config, longest)
    return RopeSpec(theta, scaling), longest


def _read_scaling(
    raw: Mapping[str, Any], config: ConfigReader, longest: int
) -> tuple[RopeScaling | None, int]:
    """``max_position_embeddings`` counts the scaled context for llama3, the unscaled one for linear
    and dynamic; yarn names the unscaled one itself when the two differ."""
    reader = ConfigReader(raw, f"{config.where}: rope_scaling")
    key = "rope_type" if reader.has("rope_type") else "type"
    kind = reader.choice(key, (*ROPE_TYPES, "gguf_tensor"), "default")
    if kind == "default":
        if reader.has("factor") and not reader.has(key):
            raise ConfigError(
                f"{reader.where}: factor is given without a rope_type; say which of "
                + ", ".join(ROPE_TYPES[1:])
            )
        return None, longest
    if kind == "gguf_tensor":
        return TensorScaling(), longest
    factor = reader.number("factor")
    if kind == "linear":
        return LinearScaling(factor), int(longest * factor)
    if kind == "dynamic":
        return DynamicScaling(factor, longest), int(longest * factor)
    original = reader.integer("original_max_position_embeddings", longest)
    if kind == "llama3":
        low, high = reader.number("low_freq_factor"), reader.number("high_freq_factor")
        if high <= low:
            raise reader.error("high_freq_factor", high, f"a number above low_freq_factor {low:g}")
        return Llama3Scaling(factor, low, high, original), longest
    return _read_yarn(reader, factor, original), max(longest, int(original * factor))


def _read_yarn(reader: ConfigReader, factor: float, original: int) -> YarnScaling:
    def magnitude(scale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0

    if reader.has("attention_factor"):
        attention = reader.number("attention_factor")
    elif reader.has("mscale") and reader.has("mscale_all_dim"):
        attention = magnitude(reader.number("mscale")) / magnitude(reader.number("mscale_all_dim"))
    else:
        attention = magnitude(1.0)
    return YarnScaling(
        factor,
        original,
        beta_fast=reader.number("beta_fast", 32.0),
        beta_slow=reader.number("beta_slow", 1.0),
        attention_factor=attention,
        truncate=reader.boolean("truncate", True),
    )
