"""The devices of this machine, found without torch."""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from octavo.config import visible_devices
from octavo.machine import available_memory
from octavo.plan.choices import Target
from octavo.plan.hardware import GPUS, Gpu

_QUERY = "name,memory.total,compute_cap"
_SECONDS = 4.0  # nvidia-smi takes one, where no driver is loaded yet a few
LOWEST_CAPABILITY = 8.0  # as worker.device
# How nvidia-smi calls those of which rates are known; the first that fits.
_TITLES = {"H200": "h200", "H100": "h100", "A100": "a100", "L40S": "l40s", "L4": "l4"}
_TITLES |= {"RTX 4090": "4090"}


@dataclass(frozen=True)
class Found:
    """``memory_bytes``: all of it, as the driver counts (CUDA shows some hundred MiB less)."""

    title: str
    memory_bytes: int
    capability: float


def gpus_here() -> list[Found]:
    """Those that the driver tells of; [] where none may be used, or it does not answer."""
    if not visible_devices():
        return []
    command = ["nvidia-smi", f"--query-gpu={_QUERY}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS)
        lines = done.stdout.splitlines() if done.returncode == 0 else []
        return [_read(line) for line in lines if line.strip()]
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return []


def _read(line: str) -> Found:
    title, mib, capability = (part.strip() for part in line.rsplit(",", 2))
    return Found(title, int(mib) << 20, float(capability))


def gpu_called(title: str) -> Gpu | None:
    words = title.replace("-", " ").upper()
    for part, name in _TITLES.items():
        if f" {part} " in f" {words} ":
            return GPUS[name]
    return None


def this_machine() -> Target:
    """The first GPU that octavo would use, else the CPU."""
    usable = [gpu for gpu in gpus_here() if gpu.capability >= LOWEST_CAPABILITY]
    if not usable or torch_cuda() is None:
        return Target("cpu", None, available_memory(), "this CPU, with the memory that is free now")
    found = usable[0]
    known = gpu_called(found.title)
    memory = known.memory_bytes if known else found.memory_bytes - (512 << 20)
    return Target("cuda", known, memory, f"this machine's {found.title}")


def torch_cuda() -> int | None:
    """The major version of CUDA that the installed torch is built for, None without it: as its
    version file says, which does not take importing it."""
    found = find_spec("torch")
    if found is None or found.origin is None:
        return None
    try:
        text = Path(found.origin).with_name("version.py").read_text()
    except OSError:
        return None
    version = re.search(r"^cuda\b[^=\n]*= *['\"](\d+)", text, re.MULTILINE)
    return int(version[1]) if version else None
