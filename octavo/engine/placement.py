"""Where the replicas of this machine run: each its own GPUs, or its share of cores and memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from octavo.config import EngineConfig, visible_devices
from octavo.engine.launch import ENGINE_COMMAND, LocalLauncher
from octavo.engine.replica import ReplicaSpec
from octavo.machine import available_cores, available_memory
from octavo.types import ConfigError


def local_replicas(
    config: EngineConfig, command: Sequence[str] = ENGINE_COMMAND
) -> list[ReplicaSpec]:
    """As many as run on this node. Raises ConfigError where there are GPUs, but too few."""
    count, world = config.parallel.num_local, config.parallel.world_size
    if count == config.parallel.data_parallel_size == 1:
        return [ReplicaSpec(config, LocalLauncher(command))]
    if not count:
        return []
    devices = visible_devices()
    if devices and len(devices) < count * world:
        spelling = "--data-parallel-size"
        if count != config.parallel.data_parallel_size:
            spelling += "-local"
        each = f" of {world} GPUs" if world > 1 else ""
        raise ConfigError(
            f"{spelling} {count}: {count} replicas{each} need {count * world} GPUs, "
            f"{len(devices)} can be seen here ({', '.join(devices)}): use "
            f"{spelling} {max(1, len(devices) // world)}, or hide the GPUs with "
            "CUDA_VISIBLE_DEVICES= to run on the CPU"
        )
    memory = None if devices or count == 1 else available_memory() // count
    specs = []
    for index in range(count):
        own = devices[index * world : (index + 1) * world]
        launcher = LocalLauncher(command, ",".join(own) if own else None)
        threads = config.parallel.cpu_threads or max(1, available_cores() // (count * world))
        specs.append(ReplicaSpec(part(config, index, threads, memory), launcher))
    return specs


def part(
    config: EngineConfig, index: int, threads: int | None = None, memory: int | None = None
) -> EngineConfig:
    """The configuration of one of the replicas: what is said of the whole server is divided.
    ``memory``: bytes it may count on; None: as many as its devices have."""
    scheduler, parallel = config.scheduler, config.parallel
    queued, count = scheduler.max_num_queued_reqs, parallel.data_parallel_size
    return replace(
        config,
        scheduler=replace(
            scheduler,
            max_num_queued_reqs=None if queued is None else -(-queued // count),
            max_num_queued_tokens=-(-scheduler.max_num_queued_tokens // count),
        ),
        parallel=replace(parallel, cpu_threads=threads, replica=index, replica_memory=memory),
    )
