"""How a model's weights are kept."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from octavo.config import ModelConfig
from octavo.ops import registry
from octavo.ops.native import library
from octavo.quant.rounding import Rounding, roundings
from octavo.quant.scheme import Scheme
from octavo.types import ConfigError

_EXACT = ("float", "float32")
_HALF = ("half", "float16")
# Spellings of vLLM for kernels of its own.
_SAME = {"gptq_marlin": "gptq", "awq_marlin": "awq", "fbgemm_fp8": "fp8"}
# What names checkpoints may have that are asked for by another one.
_ALSO = {"fp8_per_tensor": "fp8", "fp8_per_channel": "fp8", "fp8_per_block": "fp8"}


@dataclass(frozen=True)
class Quantization:
    """``name``: as in ``--quantization``, None: weights are dense. ``scheme``: of the checkpoint.
    ``rounding``: what dense weights become while loading. ``keeps_groups``: a GGUF file's quantized
    matrices come as such. ``rounds_inputs``: see ``LinearVersions``."""

    name: str | None = None
    reason: str = ""
    scheme: Scheme | None = None
    rounding: Rounding | None = None
    keeps_groups: bool = False
    rounds_inputs: bool = True


DENSE = Quantization()


def choose_quantization(
    config: ModelConfig, is_gguf: bool, device: str, scheme: Scheme | None = None
) -> Quantization:
    """For ``--quantization`` on ``device`` ("cpu", "cuda") and what the checkpoint says of itself.

    A GGUF file's groups are kept where there are kernels for them, unless FP32 was asked for on a
    CPU (with groups, inputs are rounded to 8 bits) or FP16 (which its kernels do not take). Raises
    ConfigError where what was asked for cannot be had.
    """
    asked = config.quantization
    asked = _SAME.get(asked, asked) if asked else None
    if device == "cpu" and (asked or scheme is not None):
        _check_kernels(config, asked, scheme)
    if scheme is not None:
        return _of_checkpoint(config, asked, scheme, device)
    if is_gguf and asked in (None, "gguf"):
        return _of_groups(config, asked, device)
    if asked is None:
        return DENSE
    found = roundings(device).get(asked)
    if found is None:
        kind = "a GGUF file" if asked == "gguf" else f"a checkpoint in {asked}"
        raise ConfigError(
            f"--quantization {asked}: {config.model} is not {kind}, its weights are "
            f"{'in groups of GGUF' if is_gguf else 'not quantized'}; to round them while loading "
            f"use {', '.join(roundings(device))}, or make one with `octavo quantize`"
        )
    if config.quantize_head is not None:
        found = replace(found, head=config.quantize_head)
    reason = f"--quantization {asked}: {found.meaning}"
    if asked.startswith("fp8"):
        reason += _without_float8(config, device)
    return Quantization(asked, reason, rounding=found, rounds_inputs=asked == "int8")


def _of_checkpoint(
    config: ModelConfig, asked: str | None, scheme: Scheme, device: str
) -> Quantization:
    if asked and _ALSO.get(asked, asked) != _ALSO.get(scheme.name, scheme.name):
        raise ConfigError(
            f"--quantization {asked}: {config.model} is in {scheme.name} already, as its "
            f"quantization_config says; leave the flag out"
        )
    reason = "the checkpoint's own"
    if scheme.name == "fp8":
        reason += _without_float8(config, device)
    exact = device == "cpu" and config.dtype in _EXACT
    if not exact and device == "cpu" and scheme.name in ("gptq", "awq", "compressed-tensors"):
        reason += "; inputs are rounded to 8 bits by group, --dtype float32 leaves them"
    return Quantization(scheme.name, reason, scheme=scheme, rounds_inputs=not exact)


def _of_groups(config: ModelConfig, asked: str | None, device: str) -> Quantization:
    if device == "cpu":
        native = registry.select("quantized_linear", "cpu", torch.float32).name == "native"
        if not asked and (not native or config.dtype in (*_EXACT, *_HALF)):
            return DENSE
    reason = "--quantization gguf" if asked else "the file's own groups"
    if device == "cpu" and not asked:
        reason += "; --dtype float32 expands them and is exact"
    return Quantization("gguf", reason, keeps_groups=True)


def _without_float8(config: ModelConfig, device: str) -> str:
    """What to add to the reason on a device that does not multiply FP8. Raises ConfigError where
    rounded inputs were asked for by name."""
    if device != "cpu" and multiplies_float8():
        return ""
    what = "this CPU" if device == "cpu" else "this GPU"
    if config.quantization_fp8_dynamic:
        raise ConfigError(
            f"--quantization-fp8-dynamic: inputs in FP8 need a GPU of compute capability 8.9 or "
            f"above, {what} does not multiply FP8; leave it out: weights are kept in FP8 all the "
            "same, and inputs as they are"
        )
    return f"; {what} does not multiply FP8: inputs stay as they are"


def multiplies_float8() -> bool:
    """Whether the current GPU has tensor cores for it: Ada, Hopper and later."""
    return torch.cuda.get_device_capability() >= (8, 9)


def _check_kernels(config: ModelConfig, asked: str | None, scheme: Scheme | None) -> None:
    """Raises ConfigError where this CPU cannot multiply what is quantized."""
    subject = f"--quantization {asked}:"
    if asked is None and scheme is not None:
        subject = f"{config.model}: its weights in {scheme.name}"
    if registry.select("quantized_linear", "cpu", torch.float32).name != "native":
        raise ConfigError(
            f"{subject} {'needs' if asked else 'need'} octavo's CPU kernels, which are "
            f"{library.problem() or 'for AVX2 at least: this CPU has none'}"
        )
    if config.dtype in _HALF:
        raise ConfigError(
            f"{subject} not with --dtype {config.dtype} on a CPU; use bfloat16 or float32"
        )
