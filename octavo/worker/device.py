"""Which device a worker computes on. Decided once, before anything is loaded."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from octavo.types import ConfigError

logger = logging.getLogger(__name__)

# The kernels need BF16 tensor cores and asynchronous copies to shared memory: Ampere and later.
LOWEST_CAPABILITY = (8, 0)
_DRIVER = Path("/proc/driver/nvidia/version")


@dataclass(frozen=True)
class Gpu:
    """A GPU that CUDA shows to this process."""

    index: int
    name: str
    capability: tuple[int, int]
    total_bytes: int


@dataclass(frozen=True)
class Device:
    """``kind`` is for code and for torch ("cuda" is the one made current by ``enter``), ``label``
    for people, ``reason`` says why it was chosen."""

    kind: Literal["cpu", "cuda"]
    reason: str
    gpu: Gpu | None = None

    @property
    def label(self) -> str:
        return f"cuda:{self.gpu.index} {self.gpu.name}" if self.gpu else "cpu"

    def enter(self) -> None:
        """Makes it this thread's. Raises ConfigError where the GPU gives no context."""
        if self.gpu is None:
            return
        try:
            torch.cuda.set_device(self.gpu.index)
            torch.cuda.mem_get_info()
        except RuntimeError as error:
            cause = str(error).strip().splitlines()[0]
            raise ConfigError(
                f"{self.label} cannot be used ({cause}): end what holds it, choose another with "
                "CUDA_VISIBLE_DEVICES, or hide all with CUDA_VISIBLE_DEVICES= to run on the CPU"
            ) from error


def choose_device(number: int = 0, count: int = 1) -> Device:
    """The GPU ``number`` of those that CUDA shows and that are recent enough, else the CPU. What is
    shown is the user's choice: CUDA_VISIBLE_DEVICES. Raises ConfigError where there are some, but
    fewer than the ``count`` workers of this host."""
    gpus = visible_gpus()
    if not gpus:
        return Device("cpu", _why_none())
    usable = [gpu for gpu in gpus if gpu.capability >= LOWEST_CAPABILITY]
    if not usable:
        old = gpus[0]
        reason = (
            f"{old.name} has compute capability {_dotted(old.capability)}, octavo's kernels need "
            f"{_dotted(LOWEST_CAPABILITY)}"
        )
        logger.warning("%s: running on the CPU", reason)
        return Device("cpu", reason)
    if count > len(usable):
        raise ConfigError(
            f"{count} workers need as many GPUs on this host, CUDA shows {len(usable)} that can be "
            "used: lower --tensor-parallel-size or --pipeline-parallel-size, or hide all with "
            "CUDA_VISIBLE_DEVICES= to run on the CPU"
        )
    gpu = usable[number]
    which = f"number {number} of {len(gpus)} GPUs" if len(gpus) > 1 else "the GPU"
    reason = f"{which} that CUDA shows, compute capability {_dotted(gpu.capability)}"
    return Device("cuda", reason, gpu)


def visible_gpus() -> list[Gpu]:
    if not torch.cuda.is_available():
        return []
    found = []
    for index in range(torch.cuda.device_count()):
        facts = torch.cuda.get_device_properties(index)
        found.append(Gpu(index, facts.name, (facts.major, facts.minor), facts.total_memory))
    return found


def _why_none() -> str:
    if torch.version.cuda is None and _DRIVER.exists():
        return "this torch is built without CUDA; install one with it to use the NVIDIA GPU"
    return "no NVIDIA GPU that torch can use"


def _dotted(capability: tuple[int, int]) -> str:
    return f"{capability[0]}.{capability[1]}"
