"""How much KV cache a CPU worker takes, and the length of request that fits it. No torch."""

from __future__ import annotations

from collections.abc import Callable

from octavo.config import CacheConfig, EngineConfig, ParallelConfig
from octavo.types import ConfigError
from octavo.worker.sizes import (
    SHORTEST_LENGTH,
    Defaults,
    MemoryPlan,
    Sizes,
    blocks_for,
    complete_plan,
    fit_length,
    settle_sizes,
    shown,
)

CPU_CACHE_SHARE = 0.4  # of the memory that is free once the weights are loaded
CPU_DEFAULTS = Defaults(
    block_size=16,
    max_num_seqs=128,
    max_num_batched_tokens=2048,
    block_size_why="default on a CPU",
    why="default on a CPU",
)


def plan_memory(
    config: EngineConfig,
    bytes_per_block: Callable[[int], int],
    model_length: int,
    available: int,
) -> MemoryPlan:
    """Sizes the KV cache of a CPU worker.

    ``bytes_per_block``: bytes of a block of so many tokens, all layers. ``model_length``: the most
    positions the model knows. ``available``: bytes free after loading. Raises ConfigError for an
    explicit length beyond the model, the cache or an unchunked step, and for a cache too small for
    anything or larger than what is free.
    """
    sizes = settle_sizes(config, CPU_DEFAULTS, model_length)
    length, size = sizes.max_model_len, sizes.block_size
    block_bytes = bytes_per_block(size)
    num_blocks, why = _count_blocks(
        config.cache, block_bytes, available, sizes.most_blocks, config.parallel.data_parallel_size
    )

    if num_blocks * block_bytes > available:
        raise ConfigError(
            f"the KV cache of {num_blocks} blocks needs {shown(num_blocks * block_bytes)}, "
            f"{shown(available)} of memory are free: lower --kv-cache-memory-bytes or "
            "--num-gpu-blocks-override"
        )
    if not sizes.fitted and blocks_for(length, size) > num_blocks:
        raise ConfigError(_too_long(config.cache, sizes, num_blocks, block_bytes, available))
    if sizes.fitted and num_blocks * size < min(SHORTEST_LENGTH, length):
        raise ConfigError(
            f"the KV cache holds {num_blocks} blocks of {size} tokens ({block_bytes} bytes "
            f"each): not even a request of {SHORTEST_LENGTH} tokens fits; use "
            f"--kv-cache-memory-bytes {_need(SHORTEST_LENGTH, size, block_bytes)} or more"
        )
    return complete_plan(fit_length(sizes, num_blocks), num_blocks, block_bytes, why)


def left_for_cache(parallel: ParallelConfig, free: int, weight_bytes: int) -> int:
    """Bytes that this engine may take, its weights being loaded. Of several replicas each has its
    part of what was free before any of them loaded: what is free now depends on how far the others
    have come."""
    if parallel.replica_memory is None:
        return free
    return max(0, min(free, parallel.replica_memory - weight_bytes))


def _count_blocks(
    cache: CacheConfig, block_bytes: int, available: int, most: int, num_replicas: int
) -> tuple[int, str]:
    """And why, where nobody asked for so many."""
    if cache.num_gpu_blocks_override is not None:
        return cache.num_gpu_blocks_override, "follows from --num-gpu-blocks-override"
    if cache.kv_cache_memory_bytes is not None:
        return cache.kv_cache_memory_bytes // block_bytes, ""
    share = int(available * CPU_CACHE_SHARE) // block_bytes
    if share < most:
        free = f"the {shown(available)} free after loading the weights"
        if num_replicas > 1:
            free += f", in this replica's 1/{num_replicas} of the memory"
        return share, f"{CPU_CACHE_SHARE:.0%} of {free}"
    return most, "all that max_num_seqs requests of full length can use"


def _too_long(
    cache: CacheConfig, sizes: Sizes, num_blocks: int, block_bytes: int, available: int
) -> str:
    """Needed and available, and three flags of which each would do."""
    length, size = sizes.max_model_len, sizes.block_size
    blocks, need = blocks_for(length, size), _need(length, size, block_bytes)
    fits = num_blocks * size
    if cache.num_gpu_blocks_override is not None:
        more = f"--num-gpu-blocks-override {blocks}"
        other = "--kv-cache-memory-bytes in place of the override"
    else:
        more = f"--kv-cache-memory-bytes {need}"
        other = f"--num-gpu-blocks-override {blocks}"
    shorter = f"--max-model-len {fits}" if fits else "a smaller --block-size"
    return (
        f"--max-model-len {length} needs {blocks} KV blocks of {size} tokens ({shown(need)}), "
        f"the cache has {num_blocks} ({shown(num_blocks * block_bytes)}; {shown(available)} of "
        f"memory are free): use {shorter}, {more} or {other}"
    )


def _need(length: int, size: int, block_bytes: int) -> int:
    return blocks_for(length, size) * block_bytes
