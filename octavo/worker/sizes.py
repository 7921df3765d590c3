"""Lengths and counts that follow from flags and model alone, and the length that a cache holds.

Shared by the memory plans of CPUs (memory.py) and GPUs (gpu_memory.py). No torch.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from octavo.config import EngineConfig
from octavo.types import ConfigError

# An unasked length shorter than this would only surprise: it is an error instead.
SHORTEST_LENGTH = 16


@dataclass(frozen=True)
class Defaults:
    """What a kind of device uses for what nobody asked for, and why."""

    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    block_size_why: str
    why: str


@dataclass(frozen=True)
class Sizes:
    """``max_model_len`` is the most there can be; where ``fitted`` it is lowered to what the cache
    holds. ``reasons`` says why for the values nobody asked for."""

    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    model_length: int  # the most positions the model knows
    fitted: bool
    reasons: dict[str, str] = field(default_factory=dict)

    @property
    def most_blocks(self) -> int:
        """All that max_num_seqs requests of full length can use."""
        return self.max_num_seqs * blocks_for(self.max_model_len, self.block_size)


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


def settle_sizes(config: EngineConfig, defaults: Defaults, model_length: int) -> Sizes:
    """Raises ConfigError for an explicit length beyond the model or an unchunked step."""
    reasons: dict[str, str] = {}

    def default(name: str, asked: int | None, value: int, why: str) -> int:
        if asked is None:
            reasons[name] = why
        return value if asked is None else asked

    scheduler, asked_size = config.scheduler, config.cache.block_size
    seqs = default("max_num_seqs", scheduler.max_num_seqs, defaults.max_num_seqs, defaults.why)
    tokens = default(
        "max_num_batched_tokens",
        scheduler.max_num_batched_tokens,
        defaults.max_num_batched_tokens,
        defaults.why,
    )
    size = default(
        "block_size",
        None if asked_size == -1 else asked_size,
        defaults.block_size,
        defaults.block_size_why,
    )
    asked_length = config.model.max_model_len
    fitted = asked_length is None or asked_length == -1
    if asked_length is not None and asked_length > model_length:
        raise ConfigError(
            f"--max-model-len {asked_length} is above the model's maximum of {model_length} "
            f"tokens: use --max-model-len {model_length} or less"
        )
    length = model_length if asked_length is None or fitted else asked_length
    if not scheduler.enable_chunked_prefill and length > tokens:
        if scheduler.max_num_batched_tokens is None:
            tokens = length
            reasons["max_num_batched_tokens"] = "the maximum length: no prompt is split"
        elif fitted:
            length = tokens
        else:
            raise ConfigError(
                f"--max-model-len {length} is above --max-num-batched-tokens {tokens}, and without "
                f"chunked prefill a step takes whole prompts: use --max-num-batched-tokens {length}"
            )
    return Sizes(size, seqs, tokens, length, model_length, fitted, reasons)


def fit_length(sizes: Sizes, num_blocks: int) -> Sizes:
    """``sizes`` with the length that ``num_blocks`` hold, where nobody asked for one."""
    if not sizes.fitted:
        return sizes
    length, size = sizes.max_model_len, sizes.block_size
    fits = min(length, num_blocks * size)
    lowered = f"lowered from the model's {sizes.model_length}: "
    if fits == sizes.model_length:
        why = "the model's maximum"
    elif fits == length:
        why = lowered + "no prompt is split (--max-num-batched-tokens)"
    else:
        why = f"{lowered}the KV cache holds {num_blocks} blocks of {size} tokens"
    return replace(sizes, max_model_len=fits, reasons={**sizes.reasons, "max_model_len": why})


def complete_plan(sizes: Sizes, num_blocks: int, block_bytes: int, why: str) -> MemoryPlan:
    """``why`` the cache has so many blocks; "" where that was asked for."""
    reasons = {**sizes.reasons, "kv_cache_memory_bytes": why} if why else sizes.reasons
    return MemoryPlan(
        sizes.block_size,
        num_blocks,
        num_blocks * block_bytes,
        sizes.max_model_len,
        sizes.max_num_seqs,
        sizes.max_num_batched_tokens,
        reasons,
    )


def blocks_for(num_tokens: int, block_size: int) -> int:
    return -(-num_tokens // block_size)


def shown(num_bytes: int) -> str:
    if num_bytes >= 1 << 30:
        return f"{num_bytes / (1 << 30):.2f} GiB"
    return f"{num_bytes / (1 << 20):.1f} MiB"
