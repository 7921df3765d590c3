"""The families this version runs, found by the name a checkpoint gives its architecture."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from octavo.model.families import (
    deepseek_v2,
    deepseek_v3,
    gemma,
    gemma2,
    gemma3,
    gpt2,
    gpt_oss,
    granite,
    llama,
    mistral,
    mixtral,
    olmo2,
    opt,
    phi3,
    qwen2,
    qwen2_moe,
    qwen3,
    qwen3_moe,
)
from octavo.model.families.family import Family
from octavo.types import ConfigError

FAMILIES: tuple[Family, ...] = (
    llama.FAMILY,
    mistral.FAMILY,
    qwen2.FAMILY,
    qwen3.FAMILY,
    gemma.FAMILY,
    gemma2.FAMILY,
    gemma3.FAMILY,
    phi3.FAMILY,
    gpt2.FAMILY,
    opt.FAMILY,
    olmo2.FAMILY,
    granite.FAMILY,
    mixtral.FAMILY,
    qwen2_moe.FAMILY,
    qwen3_moe.FAMILY,
    deepseek_v2.FAMILY,
    deepseek_v3.FAMILY,
    gpt_oss.FAMILY,
)


def supported_architectures() -> list[str]:
    return [name for family in FAMILIES for name in family.architectures]


def family_of(config: Mapping[str, Any], where: str) -> Family:
    """Raises ConfigError naming the architecture and those that are supported."""
    names = config.get("architectures")
    if not isinstance(names, list) or not names:
        raise ConfigError(
            f"{where}: architectures is missing; add one of " + ", ".join(supported_architectures())
        )
    for family in FAMILIES:
        if names[0] in family.architectures:
            return family
    raise ConfigError(
        f"{where}: architecture {names[0]} is not supported; supported are "
        + ", ".join(supported_architectures())
    )


def family_of_gguf(name: str, where: str) -> Family:
    """By a GGUF ``general.architecture``."""
    for family in FAMILIES:
        if name in family.gguf_architectures:
            return family
    known = [gguf for family in FAMILIES for gguf in family.gguf_architectures]
    raise ConfigError(
        f"{where}: GGUF architecture {name!r} is not supported; supported are " + ", ".join(known)
    )
