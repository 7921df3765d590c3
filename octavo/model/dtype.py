"""Which numbers to compute with."""

from __future__ import annotations

import torch

from octavo.ops.cpu.linear import has_bf16
from octavo.types import ConfigError

_NAMES = {
    "half": torch.float16,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float": torch.float32,
    "float32": torch.float32,
}
HALVES = (torch.bfloat16, torch.float16)


def choose_dtype(
    asked: str, device: str = "cpu", stored: torch.dtype | None = None
) -> tuple[torch.dtype, str]:
    """The dtype for ``--dtype`` on ``device`` ("cpu", "cuda") and why.

    auto on a CPU: BF16 where it multiplies it in hardware, whatever the checkpoint holds, else
    FP32. auto on a GPU: what the checkpoint holds (``stored``) where that is BF16 or FP16, else
    BF16: its range is FP32's. Raises ConfigError for FP32 on a GPU: its kernels take 16 bits.
    """
    if asked != "auto":
        dtype = _NAMES[asked]
        if device == "cuda" and dtype == torch.float32:
            raise ConfigError(
                f"--dtype {asked}: the kernels for GPUs compute with 16-bit numbers; use bfloat16 "
                "or float16, or CUDA_VISIBLE_DEVICES= to run on the CPU"
            )
        return dtype, f"--dtype {asked}"
    if device == "cuda":
        return _on_a_gpu(stored)
    if has_bf16():
        return torch.bfloat16, "the CPU multiplies BF16 in hardware"
    return torch.float32, "the CPU has no BF16 arithmetic (avx512_bf16 or amx_bf16)"


def _on_a_gpu(stored: torch.dtype | None) -> tuple[torch.dtype, str]:
    if stored in HALVES:
        return stored, "the checkpoint's"
    if stored is None:
        return torch.bfloat16, "default on a GPU"
    name = str(stored).removeprefix("torch.")
    return torch.bfloat16, f"the checkpoint's {name} is rounded: kernels for GPUs take 16 bits"
