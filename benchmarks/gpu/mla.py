"""Multi-head latent attention on a GPU, at DeepSeek's shapes: microseconds of a layer, and the
share of what memory or the tensor cores could do.

    python -m benchmarks.gpu.mla [--sweep]

Random data in shuffled blocks; layers take turns, so that no cache is found in L2; a captured graph
of them is replayed. ``us``: attention alone, its merge of splits inside; ``op_us``: with RoPE, the
cache write and the up-projections. ``--sweep`` times the candidates of every shape and names the
best (a minute or two). Writes benchmarks/results/gpu_mla.json.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.attention import BANDWIDTH, L2_BYTES, Columns, best, microseconds, shown
from benchmarks.report import gpus, save
from octavo.model.rope import Rope
from octavo.model.spec import RopeSpec
from octavo.ops.mla import MLAGeometry
from octavo.ops.triton import launch
from octavo.ops.triton.latent_attention import Rows, Step, TritonPagedLatentAttention
from octavo.ops.triton.latent_configs import LatentConfig, Tiles, latent_config, query_tiles

FLOPS = 989e12  # BF16, dense, of an H200
DECODE = (  # heads, rows, context
    (128, 1, 1024),
    (128, 1, 8192),
    (128, 8, 8192),
    (128, 64, 1024),
    (128, 64, 8192),
    (16, 1, 8192),
    (16, 64, 1024),
    (16, 64, 8192),
)
PREFILL = ((128, 2048), (16, 8192))  # heads, tokens
TILES = {
    128: (
        Tiles(64, 64, 8, 2),
        Tiles(64, 32, 8, 3),
        Tiles(64, 32, 8, 5),
        Tiles(32, 64, 8, 2),
        Tiles(16, 32, 4, 3),
    ),
    16: (Tiles(16, 32, 4, 3), Tiles(16, 32, 4, 5), Tiles(16, 64, 4, 2), Tiles(16, 64, 8, 3)),
}


@dataclass
class Case:
    """``rows`` rows, each with ``new`` of its ``context`` tokens to compute, over ``layers``."""

    attention: TritonPagedLatentAttention
    step: Step
    tensors: tuple[Tensor, ...]  # q, kv, key_up, value_up
    query: Tensor
    mixed: Tensor
    caches: list[Tensor]
    rows: Rows

    @property
    def config(self) -> LatentConfig:
        batch, rows = self.step.batch, self.rows
        return latent_config(
            self.attention.geometry,
            rows.count,
            rows.tokens,
            rows.even,
            batch.block_tables.shape[1] * batch.block_size,
            launch.has_wgmma(),
        )

    def attend(self, layer: int, config: LatentConfig) -> None:
        cache = self.caches[layer]
        self.attention.attend(self.query, cache, self.mixed, self.step, self.rows, config)

    def all(self, layer: int) -> None:
        q, kv, key_up, value_up = self.tensors
        self.attention(q, kv, self.caches[layer], self.step, key_up, value_up)


def case(heads: int, rows: int, context: int, new: int, block_size: int) -> Case:
    geometry = MLAGeometry(heads, 512, 64, 128, 128, 192**-0.5, interleaved=True)
    generator = torch.Generator("cuda").manual_seed(0)

    def randn(*shape: int) -> Tensor:
        made = torch.empty(*shape, dtype=torch.bfloat16, device="cuda")
        return made.normal_(generator=generator)

    width = -(-context // block_size)
    tables = torch.randperm(rows * width, generator=generator, device="cuda").view(rows, width)
    position = torch.arange(context - new, context, device="cuda")
    slots = tables[:, position // block_size] * block_size + position % block_size
    columns = Columns(
        position.repeat(rows),
        slots.flatten(),
        torch.arange(0, rows * new + 1, new, dtype=torch.int32, device="cuda"),
        torch.full((rows,), context, dtype=torch.int32, device="cuda"),
        tables.int(),
        block_size,
        rows if new == 1 else 0,
    )
    attention = TritonPagedLatentAttention(geometry)
    shape = attention.kv_shape(rows * width, block_size)
    layers = 1 + min(40, L2_BYTES // (torch.Size(shape).numel() * 2)) if new == 1 else 1
    step = attention.prepare(
        columns, Rope(RopeSpec(10_000.0), geometry.rope_dim, context, device="cuda"), torch.bfloat16
    )
    tokens = rows * new
    return Case(
        attention,
        step,
        (
            randn(tokens, heads, geometry.query_dim),
            randn(tokens, geometry.cache_dim),
            randn(heads, geometry.nope_dim, geometry.latent_dim) * geometry.latent_dim**-0.5,
            randn(heads, geometry.latent_dim, geometry.value_dim),
        ),
        randn(tokens, heads, geometry.cache_dim),
        randn(tokens, heads, geometry.latent_dim),
        [randn(*shape) for _ in range(layers)],
        Rows(0, rows, tokens, new == 1),
    )


def candidates(made: Case) -> Iterator[LatentConfig]:
    geometry, rows, chosen = made.attention.geometry, made.rows, made.config
    yield chosen
    for tiles in TILES[geometry.num_heads]:
        programs = query_tiles(geometry, rows.count, rows.tokens, rows.even, tiles.rows)
        yield replace(chosen, tiles=tiles, splits=1)
        for splits in (2, 4, 8, 16, 32, 64):
            if splits * programs * tiles.rows <= 32_768:  # the workspace, at 512 columns
                yield LatentConfig(tiles, splits, 1)


def figures(
    heads: int, rows: int, context: int, new: int, block_size: int, sweep: bool
) -> dict[str, Any]:
    made = case(heads, rows, context, new, block_size)
    config, layers = made.config, len(made.caches)
    us = microseconds(lambda layer: made.attend(layer, config), layers)
    op_us = microseconds(made.all, layers)
    geometry = made.attention.geometry
    pairs = rows * (context if new == 1 else new * (new + 1) // 2)
    flops = 2 * heads * pairs * (geometry.cache_dim + geometry.latent_dim)
    found: dict[str, Any] = {"heads": heads, "rows": rows, "context": context, "new": new}
    found |= {"us": us, "op_us": op_us, "config": asdict(config)}
    found["share_of_flops"] = flops / (us * 1e-6) / FLOPS
    if new == 1:
        size = rows * context * geometry.cache_dim * 2
        found["share_of_bandwidth"] = size / (us * 1e-6) / BANDWIDTH
    if sweep:
        found |= best(made.attend, list(candidates(made)), layers)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--block-size", type=int, default=64)
    arguments = parser.parse_args()
    size, sweep = arguments.block_size, arguments.sweep
    results: dict[str, Any] = {"gpus": gpus(), "block_size": size, "decode": [], "prefill": []}
    for heads, rows, context in DECODE:
        results["decode"].append(figures(heads, rows, context, 1, size, sweep))
        print("decode ", shown(results["decode"][-1]), flush=True)
    for heads, tokens in PREFILL:
        results["prefill"].append(figures(heads, 1, tokens, tokens, size, sweep))
        print("prefill", shown(results["prefill"][-1]), flush=True)
    print("saved as", save("gpu_mla", results))


if __name__ == "__main__":
    main()
