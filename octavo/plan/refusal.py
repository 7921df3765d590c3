"""Whether a model's weights can fit at all, told before torch is imported or a weight is read.

Only what cannot work is refused: where anything is not known (which device will be used, what the
files hold), nothing is said here, and the loader finds out. What is compared is the least that the
weights can take with the most that a device can have.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from octavo.config import EngineConfig, visible_devices
from octavo.machine import available_memory
from octavo.plan.checkpoint import Checkpoint, kept_as, read_checkpoint
from octavo.plan.local import LOWEST_CAPABILITY, gpus_here, torch_cuda
from octavo.plan.memory import ranks_of
from octavo.types import ConfigError
from octavo.worker.sizes import shown

# Weights take at most so many times their files: 2 bits each there, 32 in memory.
_MOST_EXPANDED = 16
_ROUNDINGS = {"cuda": ("fp8", "int8", "bitsandbytes"), "cpu": ("int8", "bitsandbytes")}
_DRIVER = re.compile(r"CUDA Version: (\d+)\.")


@dataclass(frozen=True)
class Limit:
    """The most that the weights of one rank may take on ``device`` ("cpu", "cuda")."""

    device: str
    num_bytes: int
    what: str


def check_fits(config: EngineConfig, path: Path) -> None:
    """Raises ConfigError, in one line with the numbers and what to change, for weights that no
    device of this machine can hold."""
    if config.parallel.nnodes > 1 or config.model.load_format not in ("auto", "safetensors"):
        return
    limit = limit_here(config)
    if limit is None or _file_bytes(path) * _MOST_EXPANDED <= limit.num_bytes:
        return
    if limit.device == "cpu" and config.model.dtype == "auto":  # which of two, torch will say
        config = replace(config, model=replace(config.model, dtype="bfloat16"))
    try:
        checkpoint = read_checkpoint(path, config, limit.device)
        weights = _largest(checkpoint, config, limit.device)
    except ConfigError:
        return  # of files and flags that do not go together the loader says more
    if checkpoint.from_config or weights <= limit.num_bytes:
        return
    parallel = config.parallel
    rank = " a rank" if parallel.world_size > 1 else ""
    how = checkpoint.kept or checkpoint.dtype
    remedies = [*_remedies(checkpoint, config, limit)]
    raise ConfigError(
        f"{path}: the weights need {shown(weights)}{rank} as {how}, {limit.what} "
        f"{shown(limit.num_bytes)}: use {', '.join(remedies)}{' or ' if remedies else ''}a smaller "
        "model (`octavo plan` lists what fits)"
    )


def limit_here(config: EngineConfig) -> Limit | None:
    """None where it cannot be told without torch which device will be used."""
    built_for = torch_cuda()
    if not visible_devices() or built_for is None:
        free = available_memory()
        own = config.parallel.rank_memory
        if own is not None and own < free:
            return Limit("cpu", own, "this replica's part of the memory is")
        return Limit("cpu", free, "the memory that is free here is")
    found = gpus_here()
    usable = [gpu for gpu in found if gpu.capability >= LOWEST_CAPABILITY]
    if not usable or len(usable) < len(found) or _driver_cuda() < built_for:
        return None
    return Limit("cuda", max(gpu.memory_bytes for gpu in usable), "the largest GPU here has")


def _driver_cuda() -> int:
    """The newest major version of CUDA that the driver runs; 0 where it does not say."""
    try:
        done = subprocess.run(["nvidia-smi"], capture_output=True, text=True, timeout=4.0)
    except (OSError, subprocess.TimeoutExpired):
        return 0
    found = _DRIVER.search(done.stdout)
    return int(found[1]) if found else 0


def _file_bytes(path: Path) -> int:
    files = [path] if path.is_file() else [*path.glob("*.safetensors")]
    if path.is_file():  # of a split model the other parts, too
        files = [*path.parent.glob("*.gguf"), path]
    return sum(file.stat().st_size for file in files)


def _largest(checkpoint: Checkpoint, config: EngineConfig, device: str) -> int:
    parallel = config.parallel
    sizes = parallel.tensor_parallel_size, parallel.pipeline_parallel_size
    return max(rank.weights for rank in ranks_of(checkpoint, config, device, *sizes))


def _remedies(checkpoint: Checkpoint, config: EngineConfig, limit: Limit) -> Iterator[str]:
    """Flags with which the weights would fit here."""
    if limit.device == "cuda":
        yield from _more_devices(checkpoint, config, limit)
    if checkpoint.kept is not None or checkpoint.is_gguf:
        return
    for name in _ROUNDINGS[limit.device]:
        size = _largest(kept_as(checkpoint, config.model, name, limit.device), config, limit.device)
        if size < limit.num_bytes:
            yield f"--quantization {name} ({shown(size)})"
            return


def _more_devices(checkpoint: Checkpoint, config: EngineConfig, limit: Limit) -> Iterator[str]:
    """The fewest of the GPUs here that hold the model."""
    count = len(visible_devices())
    for size in range(config.parallel.tensor_parallel_size + 1, count + 1):
        try:
            own = max(r.weights for r in ranks_of(checkpoint, config, limit.device, size))
        except ConfigError:
            continue
        if own < limit.num_bytes:
            yield f"-tp {size} ({shown(own)} a rank)"
            return
