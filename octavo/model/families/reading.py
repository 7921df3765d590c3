"""Typed reading of a config.json: every value is checked, and what we do not know is refused."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from octavo.model.spec import (
    Activation,
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    RMSNormSpec,
    RopeScaling,
    RopeSpec,
    TensorScaling,
    YarnScaling,
)
from octavo.types import ConfigError

_MISSING = object()
MOST = 1 << 40  # of any integer: no size of a model comes near it
MOST_NUMBER = 1e30  # FP32 can hold it
MOST_PARTS = 10_000  # layers, experts of a layer: each is built by itself
MOST_SHOWN = 120  # characters of a value in an error
ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")
LAYER_TYPES = ("full_attention", "sliding_attention")


class ConfigReader:
    """Reads one mapping of a config; ``where`` names it in errors. ``own``: a family's own keys, by
    the usual ones that they are read under."""

    def __init__(
        self,
        values: Mapping[str, Any],
        where: str = "config.json",
        own: Mapping[str, str] | None = None,
    ) -> None:
        self.values = values
        self.where = where
        self.own = own or {}

    def renamed(self, keys: Mapping[str, str]) -> ConfigReader:
        """The same with a family's own ``keys`` (the usual one -> its own) under the usual names,
        which GGUF metadata comes under in any family."""
        found = {key: self.values[own] for key, own in keys.items() if own in self.values}
        own = {key: keys[key] for key in found}
        return ConfigReader({**self.values, **found}, self.where, own)

    def has(self, key: str) -> bool:
        return self.values.get(key) is not None

    def is_null(self, key: str) -> bool:
        """Whether it says null, not nothing."""
        return key in self.values and self.values[key] is None

    def integer(self, key: str, default: Any = _MISSING, low: int = 1, high: int = MOST) -> int:
        value = self._get(key, default)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or value < low:
            raise self.error(key, value, f"an integer of at least {low}")
        if value > high:
            raise self.error(key, value, f"at most {high:,}")
        return value

    def count(self, key: str, default: Any = _MISSING, low: int = 1) -> int:
        """Of parts that are built one by one: a number of layers or experts."""
        return self.integer(key, default, low, MOST_PARTS)

    def number(self, key: str, default: Any = _MISSING) -> float:
        value = self._get(key, default)
        good = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not good or not 0 < value <= MOST_NUMBER:
            raise self.error(key, value, f"a number above 0, at most {MOST_NUMBER:g}")
        return float(value)

    def optional_number(self, key: str, default: float | None) -> float | None:
        """None where it says null; ``default`` where it says nothing."""
        value = self.values.get(key, default)
        return None if value is None else self.number(key, default)

    def numbers(self, key: str, count: int) -> tuple[float, ...]:
        values = self._get(key, _MISSING)
        good = isinstance(values, (list, tuple)) and len(values) == count
        if not good or not all(map(_is_factor, values)):
            raise self.error(key, values, f"a list of {count} numbers above 0")
        return tuple(float(x) for x in values)

    def mapping(self, key: str, allowed: Iterable[str] | None = None) -> Mapping[str, Any]:
        """A JSON object, empty for null; ``allowed``: its keys."""
        value = self.values.get(key)
        value = {} if value is None else value
        if not isinstance(value, Mapping):
            raise self.error(key, value, "null or a JSON object")
        if allowed is not None and (others := set(value).difference(allowed)):
            raise self.error(key, value, f"keys {', '.join(allowed)}, not {min(others)}")
        return value

    def boolean(self, key: str, default: Any = _MISSING) -> bool:
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise self.error(key, value, "true or false")
        return value

    def absent(self, key: str, *harmless: object) -> None:
        """Refuses a value that would change the maths: null and ``harmless`` ones are fine."""
        value = self.values.get(key)
        if value is not None and value not in harmless:
            wanted = ", ".join(["null", *(json.dumps(one) for one in harmless)])
            raise self.error(key, value, wanted)

    def choice(self, key: str, allowed: Iterable[str], default: Any = _MISSING) -> str:
        value = self._get(key, default)
        names = list(allowed)
        if value not in names:
            raise self.error(key, value, "one of " + ", ".join(names))
        return str(value)

    def error(self, key: str, value: object, wanted: str) -> ConfigError:
        key = self.own.get(key, key)
        shown = repr(value)
        if len(shown) > MOST_SHOWN:
            shown = f"{shown[:MOST_SHOWN]}… ({len(shown):,} characters)"
        return ConfigError(f"{self.where}: {key} is {shown}; this version supports {wanted}")

    def _get(self, key: str, default: Any) -> Any:
        value = self.values.get(key)
        if value is None:
            value = default
        if value is _MISSING:
            raise ConfigError(f"{self.where}: {key} is missing")
        return value


def _is_factor(value: object) -> bool:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return is_number and 0 < value < math.inf  # type: ignore[operator]


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


def read_norm(config: ConfigReader, eps: float = 1e-6) -> RMSNormSpec:
    """``eps``: the family's default."""
    return RMSNormSpec(config.number("rms_norm_eps", eps))


def read_head_dim(config: ConfigReader, num_heads: int, default: int | None = None) -> int:
    """``head_dim`` when given; else the family's ``default``, or hidden / heads, rounded down as
    the checkpoints' code does."""
    if default is None:
        default = config.integer("hidden_size") // num_heads
    head_dim = config.integer("head_dim", default)
    if head_dim % 2:
        raise config.error("head_dim", head_dim, "an even number (rotary pairs)")
    return head_dim


def read_kv_heads(config: ConfigReader, num_heads: int) -> int:
    count = config.integer("num_key_value_heads", num_heads)
    if num_heads % count:
        raise config.error("num_key_value_heads", count, f"a divisor of {num_heads} (heads)")
    return count


def read_rope(config: ConfigReader, head_dim: int, partial: bool = False) -> tuple[RopeSpec, int]:
    """The rope and the longest context it supports.

    Reads ``rope_theta``, ``partial_rotary_factor`` (1 unless the family has it: ``partial``) and
    ``rope_scaling`` (``type`` or ``rope_type``), or the newer ``rope_parameters`` that holds all.
    """
    nested = config.mapping("rope_parameters")
    raw = config.mapping("rope_scaling") or nested
    for key in ("rope_theta", "partial_rotary_factor"):
        outer_value, inner = config.values.get(key), nested.get(key)
        if None not in (outer_value, inner) and outer_value != inner:
            wanted = f"one value: rope_parameters.{key} is {inner!r}"
            raise config.error(key, outer_value, wanted)
    outer = ConfigReader({**config.values, **nested}, config.where, config.own)
    theta = outer.number("rope_theta", 10000.0)
    share = outer.number("partial_rotary_factor", 1.0)
    dim = int(head_dim * share)
    if share > 1 or (share != 1 and not partial) or dim % 2 or not dim:
        wanted = f"1.0, or less of {head_dim} numbers, evenly" if partial else "1.0"
        raise config.error("partial_rotary_factor", share, wanted)
    scaling, longest = read_scaling(raw, config, dim)
    return RopeSpec(theta, scaling, None if dim == head_dim else dim), longest


def read_scaling(
    raw: Mapping[str, Any], config: ConfigReader, dim: int
) -> tuple[RopeScaling | None, int]:
    """``max_position_embeddings`` counts the scaled context for llama3 and longrope, the unscaled
    one for linear and dynamic; yarn names the unscaled one itself when the two differ. ``dim``: the
    numbers of a head that turn."""
    longest = config.integer("max_position_embeddings")
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
    if kind == "longrope":
        key = "original_max_position_embeddings"  # Phi-3 has it beside the scaling
        original = (config if config.has(key) else reader).integer(key, longest, low=2)
        return _read_longrope(reader, original, longest, dim), longest
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


def _read_longrope(reader: ConfigReader, original: int, longest: int, dim: int) -> LongRopeScaling:
    """The attention factor is that of the paper unless given (Ding et al. 2024, section 3.3 of
    https://arxiv.org/abs/2402.13753 and Microsoft's code)."""
    factor = reader.number("factor", longest / original)
    if reader.has("attention_factor"):
        attention = reader.number("attention_factor")
    else:
        growth = math.log(factor) / math.log(original) if factor > 1 else 0.0
        attention = math.sqrt(1 + growth)
    return LongRopeScaling(
        short=reader.numbers("short_factor", dim // 2),
        long=reader.numbers("long_factor", dim // 2),
        original=original,
        attention_factor=attention,
    )


def read_windows(
    config: ConfigReader, window: int | None, slides: Callable[[int], bool]
) -> list[int | None]:
    """The sliding window of each layer: of those that ``layer_types`` calls sliding, or where the
    config has no such list, of those that ``slides`` says."""
    count = config.count("num_hidden_layers")
    types = config.values.get("layer_types")
    if types is None:
        return [window if slides(layer) else None for layer in range(count)]
    good = isinstance(types, list) and len(types) == count
    if not good or any(kind not in LAYER_TYPES for kind in types):
        raise config.error("layer_types", types, f"{count} of {', '.join(LAYER_TYPES)}")
    return [window if kind == LAYER_TYPES[1] else None for kind in types]


def yarn_magnitude(factor: float, scale: float = 1.0) -> float:
    """What YaRN multiplies by, once for queries and once for keys, where a context is ``factor``
    times the original one."""
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0


def _read_yarn(reader: ConfigReader, factor: float, original: int) -> YarnScaling:
    if reader.has("attention_factor"):
        attention = reader.number("attention_factor")
    elif reader.has("mscale") and reader.has("mscale_all_dim"):
        whole, part = reader.number("mscale"), reader.number("mscale_all_dim")
        attention = yarn_magnitude(factor, whole) / yarn_magnitude(factor, part)
    else:
        attention = yarn_magnitude(factor)
    return YarnScaling(
        factor,
        original,
        beta_fast=reader.number("beta_fast", 32.0),
        beta_slow=reader.number("beta_slow", 1.0),
        attention_factor=attention,
        truncate=reader.boolean("truncate", True),
    )
