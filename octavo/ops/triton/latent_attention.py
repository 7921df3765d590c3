"""Multi-head latent attention in Triton: the version for GPUs.

One kernel turns queries and fills the cache, cuBLAS absorbs the up-projections, one kernel attends
for rows of one token and, launched again, for the others. As in attention.py nothing here reads
lengths on the host, so that a captured step can be replayed with others.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.ops.attention import BatchColumns, Rope
from octavo.ops.mla import MLAGeometry
from octavo.ops.registry import register
from octavo.ops.triton import launch
from octavo.ops.triton.attention import rotations_by_token
from octavo.ops.triton.latent_cache import latent_cache_kernel
from octavo.ops.triton.latent_configs import (
    WIDEST_LATENT,
    WORKSPACE_BYTES,
    LatentConfig,
    latent_config,
    padded,
    query_tiles,
)
from octavo.ops.triton.latent_kernels import latent_attention_kernel, latent_merge_kernel

HEADS_AT_ONCE = 16  # turned by one program
SPLITS_AT_ONCE = 16  # merged in one step


@dataclass(slots=True)
class Workspace:
    """What splits of one context leave to be merged."""

    partial: Tensor  # FP32, WORKSPACE_BYTES
    state: Tensor  # FP32, two for each row of ``partial``

    @staticmethod
    def allocate(geometry: MLAGeometry, device: torch.device) -> Workspace:
        numbers = WORKSPACE_BYTES // 4
        states = 2 * (numbers // padded(geometry.latent_dim))
        return Workspace(
            torch.empty(numbers, dtype=torch.float32, device=device),
            torch.empty(states, dtype=torch.float32, device=device),
        )


@dataclass(slots=True)
class Step:
    """``rotations``: FP32 [positions, rope_dim], cos, then sin; [T, rope_dim] if ``by_token``."""

    batch: BatchColumns
    rotations: Tensor
    by_token: bool
    workspace: Workspace


@dataclass(frozen=True, slots=True)
class Rows:
    """Batch rows first .. first + count - 1 with ``tokens`` tokens; ``even``: all with as many."""

    first: int
    count: int
    tokens: int
    even: bool


@register("paged_latent_attention", "triton", launch.available, tolerance=8.0)
class TritonPagedLatentAttention:
    """Cache: [block, offset, latent + rope]; block_size a power of two, 16 at least.

    Raises ValueError for a latent beyond WIDEST_LATENT and other block sizes.
    """

    def __init__(self, geometry: MLAGeometry) -> None:
        if geometry.latent_dim > WIDEST_LATENT:
            raise ValueError(
                f"latent attention: {geometry.latent_dim} latent dimensions, the Triton version "
                f"takes {WIDEST_LATENT} at most"
            )
        self.geometry = geometry
        self._workspace: Workspace | None = None

    def kv_shape(self, num_blocks: int, block_size: int) -> tuple[int, ...]:
        if block_size < 16 or block_size & (block_size - 1):
            raise ValueError(f"block size {block_size}: must be a power of two, 16 at least")
        return (num_blocks, block_size, self.geometry.cache_dim)

    def prepare(self, batch: BatchColumns, rope: Rope, dtype: torch.dtype) -> Step:
        """The first call on a device takes memory there: not while a graph is captured."""
        device = batch.positions.device
        if self._workspace is None:
            if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                raise RuntimeError("latent attention: run one step before a CUDA graph is captured")
            self._workspace = Workspace.allocate(self.geometry, device)
        rotations = rope.table(rope.max_position, device)
        if rotations is None:
            return Step(batch, rotations_by_token(batch, rope), True, self._workspace)
        return Step(batch, rotations, False, self._workspace)

    def __call__(
        self, q: Tensor, kv: Tensor, cache: Tensor, state: Step, key_up: Tensor, value_up: Tensor
    ) -> Tensor:
        if cache.dtype != q.dtype:
            raise ValueError(f"latent attention: a cache of {cache.dtype} for {q.dtype} queries")
        batch, geometry = state.batch, self.geometry
        tokens, heads = len(q), geometry.num_heads
        query = q.new_empty(tokens, heads, geometry.cache_dim)
        mixed = q.new_empty(tokens, heads, geometry.latent_dim)
        out = q.new_empty(tokens, heads, geometry.value_dim)
        nope = q[..., : geometry.nope_dim].transpose(0, 1)
        torch.bmm(nope, key_up, out=query[..., : geometry.latent_dim].transpose(0, 1))
        self.rope_cache(q, kv, query, cache, mixed, state)
        for rows in self.rows_of(batch, tokens):
            context = batch.block_tables.shape[1] * batch.block_size
            config = latent_config(
                geometry, rows.count, rows.tokens, rows.even, context, launch.has_wgmma()
            )
            self.attend(query, cache, mixed, state, rows, config)
        torch.bmm(mixed.transpose(0, 1), value_up, out=out.transpose(0, 1))
        return out.flatten(1)

    @staticmethod
    def rows_of(batch: BatchColumns, tokens: int) -> list[Rows]:
        """The rows of several tokens, and those of one."""
        one = batch.decode_rows
        others = Rows(one, len(batch.seq_lens) - one, tokens - one, even=False)
        return [
            rows
            for rows in (others, Rows(0, one, one, even=True))
            if rows.count > 0 and rows.tokens > 0
        ]

    def rope_cache(
        self, q: Tensor, kv: Tensor, query: Tensor, cache: Tensor, mixed: Tensor, step: Step
    ) -> None:
        """The rotated columns of ``query``, what is cached, and 0 into ``mixed`` where a token is
        padding."""
        geometry, batch = self.geometry, step.batch
        latent_cache_kernel[(len(q), -(-geometry.num_heads // HEADS_AT_ONCE))](
            q,
            kv,
            query,
            cache,
            mixed,
            batch.slot_mapping,
            batch.positions,
            step.rotations,
            HEADS=geometry.num_heads,
            NOPE=geometry.nope_dim,
            LATENT=geometry.latent_dim,
            LATENT_PAD=padded(geometry.latent_dim),
            ROPE=geometry.rope_dim,
            HALF_PAD=launch.next_power_of_2(geometry.rope_dim // 2),
            INTERLEAVED=geometry.interleaved,
            BY_TOKEN=step.by_token,
            HEADS_AT_ONCE=HEADS_AT_ONCE,
            **launch.options(4),
        )

    def attend(
        self,
        query: Tensor,
        cache: Tensor,
        mixed: Tensor,
        step: Step,
        rows: Rows,
        config: LatentConfig,
    ) -> None:
        """mixed: weighted latents of the tokens of ``rows``, once rope_cache is done with all."""
        geometry, batch, tiles = self.geometry, step.batch, config.tiles
        grid = query_tiles(geometry, rows.count, rows.tokens, rows.even, tiles.rows)
        shared = {
            "HEADS": geometry.num_heads,
            "LATENT": geometry.latent_dim,
            "LATENT_PAD": padded(geometry.latent_dim),
            "ROWS": tiles.rows,
            "TILE": tiles.tile,
            "PER_ROW": grid // rows.count if rows.even else 0,
        }
        latent_attention_kernel[(grid, config.splits)](
            query,
            cache,
            mixed,
            step.workspace.partial,
            step.workspace.state,
            batch.query_starts,
            batch.seq_lens,
            batch.block_tables,
            rows.first,
            rows.count,
            batch.block_tables.stride(0),
            config.splits,
            config.min_tiles,
            geometry.scale * math.log2(math.e),
            ROPE=geometry.rope_dim,
            ROPE_PAD=padded(geometry.rope_dim),
            BLOCK_SIZE=batch.block_size,
            STAGES=tiles.stages,
            **shared,
            **launch.options(tiles.warps, num_stages=tiles.stages),
        )
        if config.splits > 1:
            latent_merge_kernel[(grid, tiles.rows)](
                mixed,
                step.workspace.partial,
                step.workspace.state,
                batch.query_starts,
                batch.seq_lens,
                rows.first,
                rows.count,
                config.splits,
                config.min_tiles,
                SPLITS_AT_ONCE=SPLITS_AT_ONCE,
                **shared,
                **launch.options(4),
            )
