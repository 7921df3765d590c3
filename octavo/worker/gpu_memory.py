"""How a GPU's memory is divided: weights, slots, activations, graphs, and the rest is KV cache.

First ``gpu_sizes``: what follows from flags, model and card. The worker builds its slots and runs
its largest step with them, measures, and asks ``plan_gpu_memory`` for the cache. No torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from octavo.config import GIB, EngineConfig
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

CUDA_BLOCK_SIZE = 64
LARGE_GPU = 70 * GIB
# What CUDA comes to take by itself after start-up: code of kernels, handles of libraries.
MARGIN = 512 << 20


@dataclass(frozen=True)
class GpuMemory:
    """Bytes of one GPU, found and measured while a worker starts. What is not known yet is 0."""

    total: int
    free: int  # with this process's CUDA context there, and nothing else of it
    weights: int = 0
    slots: int = 0  # state that outlives a step: histories, block tables, counts
    activations: int = 0  # peak of the largest step beyond what was there before it
    graphs: int = 0  # set aside for them

    @property
    def fixed(self) -> int:
        """All but the KV cache."""
        return self.weights + self.slots + self.activations + self.graphs

    @property
    def room(self) -> int:
        """What is there for a KV cache, whatever share this instance may use."""
        return max(0, self.free - MARGIN - self.fixed)

    def allowed(self, utilization: float) -> int:
        """What a KV cache may take under ``--gpu-memory-utilization``."""
        return max(0, min(int(self.total * utilization) - self.fixed, self.room))

    def __str__(self) -> str:
        """All of it, for messages."""
        parts = {
            "held by others": self.total - self.free,
            "weights": self.weights,
            "slots": self.slots,
            "activations": self.activations,
            "graphs": self.graphs,
        }
        listed = ", ".join(f"{name} {shown(size)}" for name, size in parts.items() if size)
        return f"{shown(self.total)} in all; {listed or 'nothing held'}"


def gpu_sizes(config: EngineConfig, model_length: int, total: int) -> Sizes:
    """``total``: bytes of the card. Raises ConfigError as ``settle_sizes`` does."""
    large = total >= LARGE_GPU
    defaults = Defaults(
        block_size=CUDA_BLOCK_SIZE,
        max_num_seqs=1024 if large else 256,
        max_num_batched_tokens=8192 if large else 2048,
        block_size_why="faster than 16 on CUDA",
        why=f"default on a GPU of {'70 GiB or more' if large else 'less than 70 GiB'}",
    )
    return settle_sizes(config, defaults, model_length)


def plan_gpu_memory(
    config: EngineConfig,
    sizes: Sizes,
    bytes_per_block: Callable[[int], int],
    memory: GpuMemory,
) -> MemoryPlan:
    """The KV cache takes what the share of this instance leaves; ``bytes_per_block`` is of all
    layers. Explicit bytes or blocks are taken as they are. Raises ConfigError, with the numbers and
    what to change, for a cache that is not there or holds no request of the length asked for."""
    block_bytes = bytes_per_block(sizes.block_size)
    num_blocks, why = _count_blocks(config, sizes, block_bytes, memory)
    if num_blocks * block_bytes > memory.room:
        raise ConfigError(
            f"the KV cache of {num_blocks} blocks needs {shown(num_blocks * block_bytes)}, "
            f"{shown(memory.room)} of the GPU's memory remain for it ({memory}): lower "
            "--kv-cache-memory-bytes or --num-gpu-blocks-override, or give neither"
        )
    length = min(SHORTEST_LENGTH, sizes.max_model_len) if sizes.fitted else sizes.max_model_len
    if blocks_for(length, sizes.block_size) > num_blocks:
        raise ConfigError(_no_room(config, sizes, length, num_blocks, block_bytes, memory))
    return complete_plan(fit_length(sizes, num_blocks), num_blocks, block_bytes, why)


def _count_blocks(
    config: EngineConfig, sizes: Sizes, block_bytes: int, memory: GpuMemory
) -> tuple[int, str]:
    """And why, where nobody asked for so many."""
    cache = config.cache
    if cache.num_gpu_blocks_override is not None:
        return cache.num_gpu_blocks_override, "follows from --num-gpu-blocks-override"
    if cache.kv_cache_memory_bytes is not None:
        return cache.kv_cache_memory_bytes // block_bytes, ""
    allowed = memory.allowed(cache.gpu_memory_utilization)
    if allowed // block_bytes >= sizes.most_blocks:
        return sizes.most_blocks, "all that max_num_seqs requests of full length can use"
    if allowed == memory.room:
        share = "all that is free"
    else:
        share = f"what --gpu-memory-utilization {cache.gpu_memory_utilization:g} leaves"
    return allowed // block_bytes, f"{share} of {memory}"


def _no_room(
    config: EngineConfig,
    sizes: Sizes,
    length: int,
    num_blocks: int,
    block_bytes: int,
    memory: GpuMemory,
) -> str:
    blocks = blocks_for(length, sizes.block_size)
    what = f"a request of {length} tokens" if sizes.fitted else f"--max-model-len {length}"
    remedies = _remedies(config, sizes, blocks * block_bytes, num_blocks, block_bytes, memory)
    if remedies:
        *some, last = remedies
        remedy = f"use {', '.join(some)}{' or ' if some else ''}{last}"
    else:
        remedy = "use a smaller model, or a GPU with more memory free"
    return (
        f"{what} needs {blocks} KV blocks of {sizes.block_size} tokens "
        f"({shown(blocks * block_bytes)}), the cache has {num_blocks} "
        f"({shown(num_blocks * block_bytes)}) of the GPU's memory ({memory}): {remedy}"
    )


def _remedies(
    config: EngineConfig,
    sizes: Sizes,
    need: int,
    num_blocks: int,
    block_bytes: int,
    memory: GpuMemory,
) -> list[str]:
    """At most three flags, each of which gives ``need`` bytes of cache or does with less."""
    found: list[str] = []
    fits = num_blocks * sizes.block_size
    if not sizes.fitted and fits:
        found.append(f"--max-model-len {fits}")
    if config.cache.num_gpu_blocks_override is not None:
        if need <= memory.room:
            found.append(f"--num-gpu-blocks-override {need // block_bytes}")
        return [*found, "no --num-gpu-blocks-override"]
    share = math.ceil(100 * (memory.fixed + need + 1) / memory.total) / 100
    automatic = config.cache.kv_cache_memory_bytes is None
    if automatic and share <= 1 and need <= memory.room:
        found.append(f"--gpu-memory-utilization {share:.2f}")
    if need <= memory.room:
        found.append(f"--kv-cache-memory-bytes {need}")
    if not automatic:
        return found
    allowed = min(int(memory.total * config.cache.gpu_memory_utilization), memory.free - MARGIN)
    found += _smaller(config, sizes, need + memory.fixed - allowed, memory)
    return found[:3]


def _smaller(config: EngineConfig, sizes: Sizes, missing: int, memory: GpuMemory) -> list[str]:
    """Flags of which each frees ``missing`` bytes. Activations grow with the tokens of a step,
    slots and graphs with the rows; a tenth is kept back for what does not."""
    found = []
    if memory.graphs >= missing and not config.enforce_eager:
        found.append("--enforce-eager")
    if config.scheduler.enable_chunked_prefill and memory.activations > missing:
        left = 0.9 * (1 - missing / memory.activations)
        if (tokens := int(sizes.max_num_batched_tokens * left) // 16 * 16) > 0:
            found.append(f"--max-num-batched-tokens {tokens}")
    by_rows = memory.slots + memory.graphs
    if by_rows > missing and (seqs := int(sizes.max_num_seqs * 0.9 * (1 - missing / by_rows))) > 0:
        found.append(f"--max-num-seqs {seqs}")
    return found


def out_of_memory(phase: str, config: EngineConfig, sizes: Sizes, memory: GpuMemory) -> ConfigError:
    """The error to end a start with when an allocation failed in ``phase`` ("weights", "profile",
    "cache", "graphs"), whatever the plan was: someone else may have taken memory meanwhile."""
    tokens, seqs = sizes.max_num_batched_tokens, sizes.max_num_seqs
    share = max(0.05, config.cache.gpu_memory_utilization - 0.1)
    fewer_tokens = f"--max-num-batched-tokens {max(16, tokens // 4)}"
    fewer_rows = f"--max-num-seqs {max(1, seqs // 4)}"
    remedies = {
        "weights": "use a smaller model, --dtype bfloat16, or end what else holds memory there",
        "profile": f"use {fewer_tokens}, {fewer_rows} or a smaller --max-model-len",
        "cache": f"use --gpu-memory-utilization {share:.2f}, {fewer_tokens} or {fewer_rows}",
        "graphs": f"use --gpu-memory-utilization {share:.2f}, {fewer_rows} or --enforce-eager",
    }
    return ConfigError(
        f"the GPU's memory ran out while starting (phase: {phase}; {memory}): {remedies[phase]}"
    )
