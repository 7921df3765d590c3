"""How Triton kernels are launched: where they run, and programmatic dependent launch (PDL).

A kernel launched with PDL may start while the one before it still runs. It touches only what no
kernel of a step writes (weights, tables of constants) until it has called ``gdc_wait``, and *every*
program calls it, also one that has nothing to do: a kernel whose programs left without waiting
would count as done before its predecessor, and the next one would run too early. When the successor
may start is the kernel's ``PDL`` argument: at once (EARLY) or after the main loop (LATE).

Measured on an H200 (Llama-8B, BF16): one row 4.13 ms a step without PDL, 3.96 EARLY, 3.98 LATE;
from 2 to 64 rows LATE is best; above that it gains nothing.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton

OFF, EARLY, LATE = 0, 1, 2

# Kernels run as Python on CPU tensors: set TRITON_INTERPRET=1 before anything imports triton.
INTERPRETED: bool = bool(triton.knobs.runtime.interpret)


def available(device: str, dtype: torch.dtype) -> bool:
    """Whether the Triton versions run there. Only ever on CUDA: tests that interpret them on a CPU
    name them, so that no model on a CPU chooses them."""
    return device == "cuda" and dtype in (torch.bfloat16, torch.float16)


@cache
def has_pdl() -> bool:
    """Compute capability 9.0 (Hopper) and later."""
    return not INTERPRETED and torch.cuda.get_device_capability() >= (9, 0)


@cache
def has_wgmma() -> bool:
    """Hopper alone: its tensor-core products and 227 KB of shared memory are what kernels with
    tiles of weights were written and measured for."""
    return INTERPRETED or torch.cuda.get_device_capability()[0] == 9


@cache
def has_one_product() -> bool:
    """Whether tiles of any size are made of one matrix instruction, so that they give equal bits:
    from Ampere to Hopper. Later tensor cores multiply tiles as a whole."""
    return INTERPRETED or torch.cuda.get_device_capability()[0] in (8, 9)


def pdl_for(rows: int) -> int:
    """OFF, EARLY or LATE for the kernels of a step of so many token rows."""
    if rows > 64 or not has_pdl():
        return OFF
    return EARLY if rows == 1 else LATE


def options(num_warps: int, pdl: int = OFF, num_stages: int | None = None) -> dict[str, Any]:
    """Launch options of one kernel call. ``pdl``: what the kernel gets as ``PDL``, from
    ``pdl_for``; the launch attribute is only named where it is on."""
    chosen: dict[str, Any] = {"num_warps": num_warps}
    if num_stages is not None:
        chosen["num_stages"] = num_stages
    if pdl != OFF:
        chosen["launch_pdl"] = True
    return chosen


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is at least n; 1 for n < 1."""
    return 1 << max(0, n - 1).bit_length()
