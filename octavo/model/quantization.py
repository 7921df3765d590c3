"""How a model's weights are kept. Never imports torch at module level."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from octavo.config import ModelConfig
from octavo.quant.rounding import Rounding, roundings
from octavo.quant.scheme import Scheme
from octavo.types import ConfigError

_EXACT = ("float", "float32")
_HALF = ("half", "float16")
# Spellings of vLLM for kernels of its own.
_SAME = {"gptq_marlin": "gptq", "awq_marlin": "awq", "fbgemm_fp8": "fp8"}
# What names checkpoints may have that are asked for by another one.
_ALSO = {"fp8_per_tensor": "fp8", "fp8_per_channel": "fp8", "fp8_per_block": "fp8"}

# Whose weights are codes into tables alone.
_TABLES = ("squeezellm", "mxfp4")


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


def native_problem() -> str | None:
    """Why octavo's kernels for CPUs do not multiply quantized weights here; None: they do."""
    import torch

    from octavo.ops import registry
    from octavo.ops.native import library

    if registry.select("quantized_linear", "cpu", torch.float32).name == "native":
        return None
    return library.problem() or "for AVX2 at least: this CPU has none"


def choose_quantization(
    config: ModelConfig, is_gguf: bool, device: str, scheme: Scheme | None = None
) -> Quantization:
    """As ``how_kept``, with the decision whether inputs are rounded."""
    return _with_inputs(how_kept(config, is_gguf, device, scheme), config, device)


def how_kept(
    config: ModelConfig,
    is_gguf: bool,
    device: str,
    scheme: Scheme | None = None,
    problem: Callable[[], str | None] = native_problem,
) -> Quantization:
    """For ``--quantization`` on ``device`` ("cpu", "cuda") and what the checkpoint says of itself.
    ``problem``: see ``native_problem``.

    A GGUF file's groups are kept where there are kernels for them: on a CPU not in FP32 (with
    groups, inputs are rounded to 8 bits) and FP16, on a GPU not in FP32 and with --deterministic.
    Raises ConfigError where what was asked for cannot be had.
    """
    asked = config.quantization
    asked = _SAME.get(asked, asked) if asked else None
    if config.quantization_fp8_dynamic and not (asked or "").startswith("fp8"):
        raise ConfigError("--quantization-fp8-dynamic: goes with --quantization fp8")
    if device == "cpu" and (asked or scheme is not None):
        _check_kernels(config, asked, scheme, problem)
    if scheme is not None:
        found = _of_checkpoint(config, asked, scheme)
    elif is_gguf and asked in (None, "gguf"):
        found = _of_groups(config, asked, device, problem)
    elif asked is None:
        found = DENSE
    else:
        found = _while_loading(config, asked, is_gguf, device)
    if config.quantize_head and found.rounding is None:
        raise ConfigError(
            f"--quantize-head: the weights of {config.model} are not rounded while loading, nor "
            f"is the head then; {'leave it out' if found.name else 'add --quantization int8'}"
        )
    return found


def _of_checkpoint(config: ModelConfig, asked: str | None, scheme: Scheme) -> Quantization:
    if asked and _ALSO.get(asked, asked) != _ALSO.get(scheme.name, scheme.name):
        raise ConfigError(
            f"--quantization {asked}: {config.model} is in {scheme.name} already, as its "
            "quantization_config says; leave the flag out"
        )
    return Quantization(scheme.name, "the checkpoint's own", scheme=scheme)


def _of_groups(
    config: ModelConfig, asked: str | None, device: str, problem: Callable[[], str | None]
) -> Quantization:
    if device == "cpu":
        if not asked and (config.dtype in (*_EXACT, *_HALF) or problem()):
            return DENSE
    elif not asked and (config.deterministic or config.dtype in _EXACT):
        return DENSE
    reason = "--quantization gguf" if asked else "the file's own groups"
    if device == "cpu" and not asked:
        reason += "; --dtype float32 expands them and is exact"
    return Quantization("gguf", reason, keeps_groups=True)


def _while_loading(config: ModelConfig, asked: str, is_gguf: bool, device: str) -> Quantization:
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
    reason = f"--quantization {asked}: {found.meaning}" + ("; the head, too" if found.head else "")
    return Quantization(asked, reason, rounding=found)


def _with_inputs(found: Quantization, config: ModelConfig, device: str) -> Quantization:
    """With the decision whether inputs are rounded, and what there is to say of it."""
    wanted = config.quantized_activations
    if found.name is None:
        if wanted == "always":
            raise ConfigError(
                f"--quantized-activations always: the weights of {config.model} are not quantized; "
                "add --quantization fp8 or int8"
            )
        return found
    is_fp8 = found.name.startswith("fp8")
    can, why = _can_round(found.name, device)
    if wanted == "always" and not can:
        raise ConfigError(
            f"--quantized-activations always: {why}; leave it out: weights stay quantized all the "
            "same, and inputs are as they come"
        )
    if wanted == "never" or not can:
        by_flag = wanted == "never"
        reason = "--quantized-activations never" if by_flag else why if is_fp8 else ""
        if reason:
            reason = f"; {reason}: inputs stay as they are"
        return replace(found, reason=found.reason + reason, rounds_inputs=False)
    if device == "cpu":
        exact = config.dtype in _EXACT and found.name not in ("int8", "gguf")
        # LLM.int8's one scale for all inputs needs them as they are: a few are very large.
        by_format = found.name in ("int8_weight_only", "bitsandbytes", "bitsandbytes_int8")
        if wanted == "auto" and (exact or by_format):
            return replace(found, rounds_inputs=False)
        if found.scheme is not None:
            note = "; inputs of weights on an even grid are rounded to 8 bits by group"
            return replace(found, reason=found.reason + note)
    return found


def _can_round(name: str, device: str) -> tuple[bool, str]:
    """Whether the device multiplies what ``name`` rounds inputs to, else why not."""
    what = "this CPU" if device == "cpu" else "this GPU"
    if name in _TABLES:
        return False, f"{name}'s codes stand for numbers of a table, which are no integers"
    if name.startswith("fp8"):
        if device != "cpu" and multiplies_float8():
            return True, ""
        return False, f"{what} does not multiply FP8 (GPUs of compute capability 8.9 and above do)"
    by_format = ("int8", "compressed-tensors")
    if device != "cpu" and name not in by_format:
        return False, f"{name} has no rounded inputs on a GPU"
    return True, ""


def multiplies_float8() -> bool:
    """Whether the current GPU has tensor cores for it: Ada, Hopper and later."""
    import torch

    return torch.cuda.get_device_capability() >= (8, 9)


def _check_kernels(
    config: ModelConfig,
    asked: str | None,
    scheme: Scheme | None,
    problem: Callable[[], str | None],
) -> None:
    """Raises ConfigError where this CPU cannot multiply what is quantized."""
    subject = f"--quantization {asked}:"
    if asked is None and scheme is not None:
        subject = f"{config.model}: its weights in {scheme.name}"
    if why := problem():
        raise ConfigError(
            f"{subject} {'needs' if asked else 'need'} octavo's CPU kernels, which are {why}"
        )
    if config.dtype in _HALF:
        raise ConfigError(
            f"{subject} not with --dtype {config.dtype} on a CPU; use bfloat16 or float32"
        )
