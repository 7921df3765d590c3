"""Which numbers to compute with."""

from __future__ import annotations

import torch

from octavo.ops.cpu.linear import has_bf16

_NAMES = {
    "half": torch.float16,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float": torch.float32,
    "float32": torch.float32,
}


def choose_dtype(asked: str) -> tuple[torch.dtype, str]:
    """The dtype for ``--dtype`` on this CPU and why. auto: BF16 where the CPU multiplies it in
    hardware, whatever the checkpoint holds, else FP32."""
    if asked != "auto":
        return _NAMES[asked], f"--dtype {asked}"
    if has_bf16():
        return torch.bfloat16, "the CPU multiplies BF16 in hardware"
    return torch.float32, "the CPU has no BF16 arithmetic (avx512_bf16 or amx_bf16)"
