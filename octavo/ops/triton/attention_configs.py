"""Tile sizes, warps and splits of the attention kernels, by shape.

Measured on an H200 with 32 query and 8 kv heads of 128 and 16-bit caches, by
``python -m benchmarks.gpu.attention --sweep``; other shapes follow by the bytes of a tile.
"""

from __future__ import annotations

from dataclasses import dataclass

from octavo.ops.attention import AttentionGeometry
from octavo.ops.triton.launch import next_power_of_2

WORKSPACE_BYTES = 32 << 20  # of partial results, for all splits of a step
PROGRAMS = 250  # about two for each multiprocessor of an H200
MOST_SPLITS = 64


@dataclass(frozen=True)
class DecodeConfig:
    """``tile``: keys at a time. ``stages``: of the pipeline; looking up a block takes every second
    one. ``splits``: most parts of a context. ``min_tiles``: least tiles in one."""

    tile: int
    warps: int
    stages: int
    splits: int
    min_tiles: int


@dataclass(frozen=True)
class PrefillConfig:
    """``rows``: matrix rows, tokens x heads of a group, in a program. ``tma``: keys and values
    through the bulk copy engine (Hopper). ``alike``: all tiles of keys by the same instructions."""

    rows: int
    tile: int
    warps: int
    stages: int
    tma: bool
    alike: bool = False


def padded(dim: int) -> int:
    """Matrix products need powers of two, and 16 at least."""
    return max(16, next_power_of_2(dim))


def group_of(geometry: AttentionGeometry) -> int:
    return geometry.num_heads // geometry.num_kv_heads


def most_parts(geometry: AttentionGeometry, queries: int = 1) -> int:
    """Partial results that the workspace holds, of one kv head and split each."""
    return WORKSPACE_BYTES // (4 * group_of(geometry) * queries * padded(geometry.head_dim))


def decode_config(
    geometry: AttentionGeometry, rows: int, context: int, queries: int = 1
) -> DecodeConfig:
    """For ``rows`` rows of up to ``context`` tokens each, what the block tables have room for.

    At about 1,024 tokens each, splits bring the programs to PROGRAMS. Longer contexts get more, of
    at least as many tokens, so that one long row does not hold up a batch of short ones."""
    programs = rows * geometry.num_kv_heads
    wide = padded(geometry.head_dim)
    few = programs <= 16 and wide <= 128  # latency counts, not bandwidth
    tile = 64 if few or wide <= 64 else 32
    warps = 2 if programs < 64 or wide > 128 else 1
    if few or group_of(geometry) * queries > 16:
        warps = 4
    tokens = min(max(64, 4 * next_power_of_2(programs)), 2048)
    splits = max(16, next_power_of_2(-(-PROGRAMS // programs)))
    room = max(1, most_parts(geometry, queries) // programs)
    splits = min(splits, MOST_SPLITS, 1 << (room.bit_length() - 1), -(-context // tokens))
    return DecodeConfig(tile, warps, 5 if warps < 4 else 3, splits, max(1, tokens // tile))


def prefill_config(
    geometry: AttentionGeometry, rows: int, tokens: int, block_size: int, hopper: bool
) -> PrefillConfig:
    """For ``rows`` rows that bring ``tokens`` tokens together."""
    wide = padded(geometry.head_dim)
    programs = (tokens * group_of(geometry) // 128 + rows) * geometry.num_kv_heads
    short = programs < 132 or tokens * group_of(geometry) <= 64 * rows
    if wide > 128:
        small = short or not hopper  # 128 rows take 104 KB of shared memory, some GPUs have 99
        return PrefillConfig(64, 32, 4, 2, False) if small else PrefillConfig(128, 32, 8, 2, False)
    tma = hopper and block_size >= 64 and wide == geometry.head_dim and wide >= 64
    if short or (tma and tokens <= 2048 * rows):
        return PrefillConfig(64, 64, 4, 3, tma)
    if tma:
        return PrefillConfig(128, 64, 4, 2, True)
    return PrefillConfig(128, 64, 8, 3, False)


def fixed_config(geometry: AttentionGeometry) -> PrefillConfig:
    """For rows of any number of tokens, so that a token meets its keys in the same way in each."""
    if padded(geometry.head_dim) > 128:
        return PrefillConfig(64, 32, 4, 2, tma=False, alike=True)
    return PrefillConfig(64, 64, 4, 3, tma=False, alike=True)
