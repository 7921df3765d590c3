"""How much KV cache a worker takes, and the length of request that fits it. No torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from octavo.config import CacheConfig, EngineConfig
from octavo.types import ConfigError

CPU_BLOCK_SIZE = 16
CPU_MAX_NUM_SEQS = 128
CPU_MAX_NUM_BATCHED_TOKENS = 2048
CPU_CACHE_SHARE = 0.4  # of the memory that is free once the weights are loaded
# An unasked length shorter than this would only surprise: it is an error instead.
SHORTEST_LENGTH = 16


@dataclass(frozen=True)
class MemoryPlan:
    """The sizes a worker is built with; ``reasons`` says why for those nobody asked for."""

    block_size: int
    num_blocks: int
    kv_cache_bytes: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    reasons: dict[str, str]


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
    reasons: dict[str, str] = {}

    def default(name: str, asked: int | None, value: int, why: str) -> int:
        if asked is None:
            reasons[name] = why
        return value if asked is None else asked

    seqs = default(
        "max_num_seqs", config.scheduler.max_num_seqs, CPU_MAX_NUM_SEQS, "default on a CPU"
    )
    tokens = default(
        "max_num_batched_tokens",
        config.scheduler.max_num_batched_tokens,
        CPU_MAX_NUM_BATCHED_TOKENS,
        "default on a CPU",
    )
    asked_size = config.cache.block_size
    size = default(
        "block_size",
        None if asked_size == -1 else asked_size,
        CPU_BLOCK_SIZE,
        "default on a CPU",
    )
    block_bytes = bytes_per_block(size)
    asked_length = config.model.max_model_len
    fitted = asked_length is None or asked_length == -1
    if asked_length is not None and asked_length > model_length:
        raise ConfigError(
            f"--max-model-len {asked_length} is above the model's maximum of {model_length} "
            f"tokens: use --max-model-len {model_length} or less"
        )
    length = model_length if asked_length is None or fitted else asked_length
    if not config.scheduler.enable_chunked_prefill and length > tokens:
        if config.scheduler.max_num_batched_tokens is None:
            tokens = length
            reasons["max_num_batched_tokens"] = "the maximum length: no prompt is split"
        elif fitted:
            length = tokens
        else:
            raise ConfigError(
                f"--max-model-len {length} is above --max-num-batched-tokens {tokens}, and without "
                f"chunked prefill a step takes whole prompts: use --max-num-batched-tokens {length}"
            )
    most = seqs * blocks_for(length, size)
    num_blocks = _count_blocks(config.cache, block_bytes, available, most, reasons)

    if num_blocks * block_bytes > available:
        raise ConfigError(
            f"the KV cache of {num_blocks} blocks needs {_size(num_blocks * block_bytes)}, "
            f"{_size(available)} of memory are free: lower --kv-cache-memory-bytes or "
            "--num-gpu-blocks-override"
        )
    if not fitted and blocks_for(length, size) > num_blocks:
        raise ConfigError(_too_long(config.cache, length, num_blocks, size, block_bytes, available))
    if fitted:
        fits = min(length, num_blocks * size)
        if fits < min(SHORTEST_LENGTH, length):
            raise ConfigError(
                f"the KV cache holds {num_blocks} blocks of {size} tokens ({block_bytes} bytes "
                f"each): not even a request of {SHORTEST_LENGTH} tokens fits; use "
                f"--kv-cache-memory-bytes {_need(SHORTEST_LENGTH, size, block_bytes)} or more"
            )
        lowered = f"lowered from the model's {model_length}: "
        if fits == model_length:
            reasons["max_model_len"] = "the model's maximum"
        elif fits == length:
            reasons["max_model_len"] = lowered + "no prompt is split (--max-num-batched-tokens)"
        else:
            reasons["max_model_len"] = (
                f"{lowered}the KV cache holds {num_blocks} blocks of {size} tokens"
            )
        length = fits
    return MemoryPlan(size, num_blocks, num_blocks * block_bytes, length, seqs, tokens, reasons)


def blocks_for(num_tokens: int, block_size: int) -> int:
    return -(-num_tokens // block_size)


def _count_blocks(
    cache: CacheConfig, block_bytes: int, available: int, most: int, reasons: dict[str, str]
) -> int:
    if cache.num_gpu_blocks_override is not None:
        reasons["kv_cache_memory_bytes"] = "follows from --num-gpu-blocks-override"
        return cache.num_gpu_blocks_override
    if cache.kv_cache_memory_bytes is not None:
        return cache.kv_cache_memory_bytes // block_bytes
    share = int(available * CPU_CACHE_SHARE) // block_bytes
    if share < most:
        reasons["kv_cache_memory_bytes"] = (
            f"{CPU_CACHE_SHARE:.0%} of the {_size(available)} free after loading the weights"
        )
        return share
    reasons["kv_cache_memory_bytes"] = "all that max_num_seqs requests of full length can use"
    return most


def _too_long(
    cache: CacheConfig, length: int, num_blocks: int, size: int, block_bytes: int, available: int
) -> str:
    """Needed and available, and three flags of which each would do."""
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
        f"--max-model-len {length} needs {blocks} KV blocks of {size} tokens ({_size(need)}), "
        f"the cache has {num_blocks} ({_size(num_blocks * block_bytes)}; {_size(available)} of "
        f"memory are free): use {shorter}, {more} or {other}"
    )


def _need(length: int, size: int, block_bytes: int) -> int:
    return blocks_for(length, size) * block_bytes


def _size(num_bytes: int) -> str:
    if num_bytes >= 1 << 30:
        return f"{num_bytes / (1 << 30):.2f} GiB"
    return f"{num_bytes / (1 << 20):.1f} MiB"
