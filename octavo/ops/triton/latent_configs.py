"""Tile sizes, warps and splits of the latent attention kernel, by shape. Candidates are timed by
``benchmarks/gpu/mla.py --sweep``."""

from __future__ import annotations

from dataclasses import dataclass

from octavo.ops.mla import MLAGeometry
from octavo.ops.triton.launch import next_power_of_2

WORKSPACE_BYTES = 64 << 20  # of partial results, for all splits of a launch
MULTIPROCESSORS = 132
MOST_SPLITS = 64
WIDEST_LATENT = 512  # what 64 matrix rows of it leave room for in registers


@dataclass(frozen=True)
class Tiles:
    """``rows``: matrix rows, tokens x heads, in a program. ``tile``: keys at a time. ``stages``: of
    the pipeline."""

    rows: int
    tile: int
    warps: int
    stages: int


@dataclass(frozen=True)
class LatentConfig:
    """``splits``: most parts of a context. ``min_tiles``: least tiles of keys in one."""

    tiles: Tiles
    splits: int
    min_tiles: int


def padded(dim: int) -> int:
    """Matrix products need powers of two, and 16 at least."""
    return max(16, next_power_of_2(dim))


def query_tiles(geometry: MLAGeometry, rows: int, tokens: int, even: bool, size: int) -> int:
    """How many times ``size`` matrix rows hold ``tokens`` tokens of ``rows`` batch rows, at most;
    exactly if ``even``: all rows bring as many."""
    lines = tokens * geometry.num_heads
    return rows * -(-lines // rows // size) if even else lines // size + rows


def most_parts(geometry: MLAGeometry, size: int) -> int:
    """Partial results of ``size`` matrix rows that the workspace holds."""
    return WORKSPACE_BYTES // (4 * size * padded(geometry.latent_dim))


def tiles_for(geometry: MLAGeometry, lines: int, hopper: bool) -> Tiles:
    """For ``lines`` matrix rows of a batch row. Tiles of 64 rows and keys with a latent of 512 take
    216 KB of shared memory, which Hopper alone has of the GPUs these kernels are written for; they
    read what is cached once for 64 heads and use its wide matrix instructions."""
    wide = padded(geometry.latent_dim) > 256
    if lines <= 16 or not hopper:
        return Tiles(16, 32, 4, 3)
    if lines <= 32:
        return Tiles(32, 64, 8 if wide else 4, 2)
    return Tiles(64, 64, 8 if wide else 4, 2)


def latent_config(
    geometry: MLAGeometry, rows: int, tokens: int, even: bool, context: int, hopper: bool
) -> LatentConfig:
    """For ``rows`` batch rows that bring ``tokens`` tokens together, with contexts of ``context``
    tokens at most: what the block tables have room for.

    A partial result of 64 rows takes as many bytes as 114 tokens of the cache, so contexts are
    split for two rounds of programs at most."""
    tiles = tiles_for(geometry, tokens * geometry.num_heads // rows, hopper)
    programs = query_tiles(geometry, rows, tokens, even, tiles.rows)
    at_once = MULTIPROCESSORS * (1 if tiles.rows > 16 else 3)
    least = 128 if programs * 8 <= at_once else 512  # tokens in a split
    most = min(MOST_SPLITS, 2 * at_once // programs, most_parts(geometry, tiles.rows) // programs)
    most = 1 << (max(1, most).bit_length() - 1)
    return LatentConfig(tiles, min(most, -(-context // least)), max(1, least // tiles.tile))
