"""How a model's weights are kept."""

from __future__ import annotations

import torch

from octavo.config import ModelConfig
from octavo.ops import registry
from octavo.ops.native import library
from octavo.types import ConfigError

_EXACT = ("float", "float32")
_HALF = ("half", "float16")


def choose_quantization(config: ModelConfig, is_gguf: bool, device: str) -> tuple[str | None, str]:
    """For ``--quantization`` on ``device`` ("cpu", "cuda"): "int8" (dense weights are rounded while
    loading), "gguf" (a file's groups are kept) or None (dense weights), and why.

    A GGUF file's groups are kept on a CPU that has kernels for them, unless FP32 was asked for
    (with groups, inputs are rounded to 8 bits) or FP16 (which the kernels do not take). Raises
    ConfigError where what was asked for cannot be had.
    """
    asked = config.quantization
    if asked == "gguf" and not is_gguf:
        raise ConfigError(
            f"--quantization gguf: {config.model} is no GGUF file; use int8, or leave it out"
        )
    if device != "cpu":
        if asked:
            raise ConfigError(
                f"--quantization {asked}: not in this version on a GPU; leave it out, or hide the "
                "GPU with CUDA_VISIBLE_DEVICES= to run on the CPU"
            )
        return None, ""
    native = registry.select("quantized_linear", "cpu", torch.float32).name == "native"
    if asked and not native:
        raise ConfigError(
            f"--quantization {asked}: needs octavo's CPU kernels, which are "
            f"{library.problem() or 'for AVX2 at least: this CPU has none'}"
        )
    if asked and config.dtype in _HALF:
        raise ConfigError(
            f"--quantization {asked}: not with --dtype {config.dtype} on a CPU; use bfloat16 or "
            "float32"
        )
    if asked:
        return asked, f"--quantization {asked}"
    if is_gguf and native and config.dtype not in (*_EXACT, *_HALF):
        return "gguf", "the file's own groups; --dtype float32 expands them and is exact"
    return None, ""
