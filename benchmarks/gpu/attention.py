"""Paged attention on a GPU, kernel by kernel: microseconds a layer, and the share of what memory or
the tensor cores could do.

    python -m benchmarks.gpu.attention [--sweep] [--kv-cache-dtype fp8]

Random data in shuffled blocks; layers take turns, so that no cache is found in L2; a captured graph
of them is replayed. Decode: RoPE and the cache write are inside. ``--sweep`` times the candidates
of every shape and names the best (minutes: each tile size is compiled once). Writes
benchmarks/results/gpu_attention.json; with a cache of 8 bits gpu_attention_fp8.json and so on.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor
from triton.runtime.errors import OutOfResources

from benchmarks.report import gpus, save
from octavo.model.kv_cache import DTYPES
from octavo.model.rope import Rope
from octavo.model.spec import RopeSpec
from octavo.ops import fa3
from octavo.ops.attention import AttentionGeometry
from octavo.ops.triton import launch
from octavo.ops.triton.attention import Layer, Step, TritonPagedAttention
from octavo.ops.triton.attention_configs import (
    DecodeConfig,
    PrefillConfig,
    decode_config,
    prefill_config,
)

BANDWIDTH = 4.3e12  # bytes a second of a copy on an H200
L2_BYTES = 60 << 20
LLAMA = AttentionGeometry(32, 8, 128)
DECODE = {  # (rows, context) -> us of vLLM 0.24 with FA3 on an H200 (NVIDIA's tables)
    (1, 128): None,
    (1, 1024): 13.6,
    (1, 8192): 18.9,
    (8, 128): None,
    (8, 1024): 17.4,
    (8, 8192): 83.3,
    (64, 128): 25.5,
    (64, 1024): 80.7,
    (64, 8192): 491.0,
    (256, 128): 80.3,
    (256, 512): 177.0,
    (256, 1024): 272.0,
}
PREFILL = {1024: 244, 2048: 393, 4096: 513, 8192: 586, 16384: 652}  # tokens -> TFLOP/s of FA3
TILES = ((32, 1, 5), (32, 2, 5), (64, 2, 3), (64, 2, 5), (64, 4, 3), (128, 4, 3))
PREFILL_CANDIDATES = (
    PrefillConfig(128, 64, 4, 2, True),
    PrefillConfig(128, 64, 4, 3, True),
    PrefillConfig(128, 64, 8, 2, True),
    PrefillConfig(128, 64, 8, 3, True),
    PrefillConfig(64, 64, 4, 3, True),
    PrefillConfig(128, 64, 4, 3, False),
    PrefillConfig(128, 64, 8, 3, False),
    PrefillConfig(128, 128, 8, 2, False),
    PrefillConfig(64, 64, 4, 3, False),
)


@dataclass
class Columns:
    positions: Tensor
    slot_mapping: Tensor
    query_starts: Tensor
    seq_lens: Tensor
    block_tables: Tensor
    block_size: int
    decode_rows: int
    query_starts_host: None = None
    seq_lens_host: None = None
    queries: int = 1


@dataclass
class Case:
    """``rows`` rows, each with ``new`` of its ``context`` tokens to compute, over ``layers``."""

    geometry: AttentionGeometry
    attention: TritonPagedAttention
    step: Step
    qkv: Tensor
    out: Tensor
    layers: list[Layer]
    rows: int
    context: int
    kv_bytes: int  # of a layer's cache

    def decode(self, layer: int, config: DecodeConfig) -> None:
        self.attention.decode(self.qkv, self.layers[layer], self.out, self.step, config)

    def prefill(self, layer: int, config: PrefillConfig) -> None:
        self.attention.prefill(self.qkv, self.layers[layer], self.out, self.step, config)

    def attend_rest(self, layer: int) -> None:
        self.attention.attend_rest(self.qkv, self.layers[layer], self.out, self.step)

    def rope_cache(self, layer: int) -> None:
        self.attention.rope_cache(self.qkv, self.layers[layer], self.out, self.step)


def case(
    geometry: AttentionGeometry,
    rows: int,
    context: int,
    new: int,
    block_size: int,
    version: type[TritonPagedAttention] = TritonPagedAttention,
) -> Case:
    generator = torch.Generator("cuda").manual_seed(0)
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
    attention = version(geometry)
    shape = attention.kv_shape(rows * width, block_size)
    size = torch.Size(shape).numel() * (geometry.cache_dtype or torch.bfloat16).itemsize
    layers = 1 + min(40, L2_BYTES // size) if new == 1 else 1
    heads = geometry.num_heads + 2 * geometry.num_kv_heads
    qkv = torch.empty(rows * new, heads * geometry.head_dim, dtype=torch.bfloat16, device="cuda")
    qkv.normal_(generator=generator)
    rope = Rope(RopeSpec(500_000.0), geometry.head_dim, context, device="cuda")
    step = attention.prepare(columns, rope, torch.bfloat16)
    out = qkv.new_empty(rows * new, geometry.num_heads * geometry.head_dim)
    caches = [
        attention.layer(random_cache(shape, geometry, generator), step) for _ in range(layers)
    ]
    return Case(geometry, attention, step, qkv, out, caches, rows, context, size)


def random_cache(
    shape: tuple[int, ...], geometry: AttentionGeometry, generator: torch.Generator
) -> Tensor:
    if geometry.cache_dtype == torch.int8:
        cache = torch.randint(
            -127, 128, shape, dtype=torch.int8, device="cuda", generator=generator
        )
        block_size = shape[-1] // (geometry.head_dim + 4)
        cache.view(torch.float32)[..., block_size * geometry.head_dim // 4 :] = 0.02
        return cache
    wide = torch.empty(shape, dtype=torch.bfloat16, device="cuda").normal_(generator=generator)
    return wide.to(geometry.cache_dtype or torch.bfloat16)


def microseconds(run: Callable[[int], None], layers: int, seconds: float = 0.1) -> float:
    """Median time of one call, captured in turn over the layers."""
    run(0)
    calls = max(8, layers)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in range(calls):
            run(call % layers)

    def replay(times: int) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(times):
            graph.replay()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / times / calls * 1e3

    once = replay(3)
    times = max(1, int(seconds / 7 / (once * calls * 1e-6)))
    return statistics.median(replay(times) for _ in range(7))


def decode_candidates(geometry: AttentionGeometry, case: Case) -> Iterator[DecodeConfig]:
    chosen = decode_config(geometry, case.rows, case.context)
    programs = case.rows * geometry.num_kv_heads
    for tile, warps, stages in TILES:
        for splits in (1, 2, 4, 8, 16, 32, 64):
            if splits == 1 or (splits * programs <= 1024 and splits * tile <= case.context):
                yield DecodeConfig(tile, warps, stages, splits, 1)
        yield replace(chosen, tile=tile, warps=warps, stages=stages)


def timed(run: Callable[[int, Any], None], config: Any, layers: int) -> float | None:
    """None where the configuration asks for more shared memory than there is."""
    try:
        return microseconds(lambda layer: run(layer, config), layers, 0.03)
    except OutOfResources:
        return None


def best(run: Callable[[int, Any], None], candidates: list[Any], layers: int) -> dict[str, Any]:
    found = [(us, config) for config in candidates if (us := timed(run, config, layers))]
    us, config = min(found, key=lambda pair: pair[0])
    return {"best_us": us, "best": asdict(config)}


def decode_figures(
    geometry: AttentionGeometry, rows: int, context: int, block_size: int, sweep: bool
) -> dict[str, Any]:
    made = case(geometry, rows, context, 1, block_size)
    config = decode_config(geometry, rows, context)
    layers = len(made.layers)
    us = microseconds(lambda layer: made.decode(layer, config), layers)
    size = made.kv_bytes * context / (-(-context // block_size) * block_size)
    figures = {"rows": rows, "context": context, "us": us, "config": asdict(config)}
    figures |= {
        "share_of_bandwidth": size / (us * 1e-6) / BANDWIDTH,
        "bar_us": DECODE[rows, context],
    }
    if sweep:
        figures |= best(made.decode, list(decode_candidates(geometry, made)), layers)
    return figures


def prefill_figures(
    geometry: AttentionGeometry, tokens: int, block_size: int, sweep: bool
) -> dict[str, Any]:
    made = case(geometry, 1, tokens, tokens, block_size)
    config = prefill_config(geometry, 1, tokens, block_size, launch.has_pdl())
    us = microseconds(lambda layer: made.prefill(layer, config), 1)
    flops = 2 * tokens * tokens * geometry.num_heads * geometry.head_dim
    figures = {"tokens": tokens, "us": us, "config": asdict(config)}
    figures |= {"tflops": flops / us * 1e-6, "bar_tflops": PREFILL[tokens]}
    figures["rope_cache_us"] = microseconds(made.rope_cache, 1)
    if fa3.available("cuda", torch.bfloat16) and geometry.cache_dtype is None:
        other = case(geometry, 1, tokens, tokens, block_size, fa3.FA3PagedAttention)
        figures["fa3_tflops"] = flops / microseconds(other.attend_rest, 1) * 1e-6
    if sweep:
        candidates = [c for c in PREFILL_CANDIDATES if not c.tma or block_size >= c.tile]
        found = best(made.prefill, candidates, 1)
        figures |= found | {"best_tflops": flops / found["best_us"] * 1e-6}
    return figures


def shown(figures: dict[str, Any]) -> str:
    parts = (f"{k}={v:.3g}" if isinstance(v, float) else f"{k}={v}" for k, v in figures.items())
    return "  ".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--block-size", type=int, default=64)
    parser.add_argument("--kv-cache-dtype", choices=("auto", *DTYPES), default="auto")
    arguments = parser.parse_args()
    size, sweep = arguments.block_size, arguments.sweep
    kind = arguments.kv_cache_dtype
    geometry = replace(LLAMA, cache_dtype=DTYPES.get(kind))
    results: dict[str, Any] = {"gpus": gpus(), "block_size": size, "decode": [], "prefill": []}
    for rows, context in DECODE:
        results["decode"].append(decode_figures(geometry, rows, context, size, sweep))
        print("decode ", shown(results["decode"][-1]), flush=True)
    for tokens in PREFILL:
        results["prefill"].append(prefill_figures(geometry, tokens, size, sweep))
        print("prefill", shown(results["prefill"][-1]), flush=True)
    print("saved as", save("gpu_attention" if kind == "auto" else f"gpu_attention_{kind}", results))


if __name__ == "__main__":
    main()
