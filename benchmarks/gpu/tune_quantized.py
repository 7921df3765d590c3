"""Measures which kernel multiplies each linear on quantized weights fastest; writes the plans.

    python -m benchmarks.gpu.tune_quantized --kinds float8,int4 --buckets 1,16,64 --seconds 120

As ``tune.py`` measures: microseconds per call in a captured chain over more weights than the L2
cache holds. A result of each candidate is checked against the first one's, which is checked against
FP32.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.tune import CALLS, COLD, ROWS, shapes_of
from octavo.ops.float8 import quantize_float8
from octavo.ops.triton.packed import Layout, pack
from octavo.ops.triton.packed_plans import (
    EXPAND,
    TABLE,
    PackedPlan,
    kind_of,
    rounded_plan,
    rule_of_thumb,
    tile_of,
)
from octavo.ops.triton.packed_skinny import packed_skinny, tiles
from octavo.ops.triton.plans import Shape
from octavo.ops.triton.rounding import rounded
from octavo.ops.triton.weight_only import PackedLinear
from octavo.ops.weights import Quantized, QuantizedWeight, TableWeight

WORST = 0.02
COUNTS = ROWS | {128: 128, 256: 256}


def weight_of(kind: str, n: int, k: int) -> Quantized:
    """float8, float8-block, int2 .. int8 with groups after a dash (int4-32), nf4."""
    name, _, tail = kind.partition("-")
    if name == "float8":
        dense = torch.randn(n, k, device="cuda", dtype=torch.bfloat16) / k**0.5
        return quantize_float8(dense, (128, 128) if tail == "block" else (1, 0))
    bits = int(name[-1])
    codes = torch.randint(0, 1 << bits, (n, k), device="cuda", dtype=torch.uint8)
    group = int(tail or 128)
    scales = (torch.rand(n, -(-k // group), device="cuda") + 0.5) / k**0.5 / (1 << bits)
    if name == "nf4":
        table = torch.randn(16, device="cuda")
        return TableWeight(codes, table, scales, 4, group)
    return QuantizedWeight(codes, scales.half(), None, bits, group, 1 << (bits - 1))


class Subject:
    """One shape: copies of its packed weight that do not fit into the cache together."""

    def __init__(self, kind: str, shape: Shape, dtype: torch.dtype) -> None:
        self.kind, self.shape, self.dtype = kind, shape, dtype
        weight = weight_of(kind, shape.n, shape.k)
        packed = pack(weight)
        self.dense = weight.dense().to(dtype)
        self.bytes = sum(tensor.nbytes for tensor in packed.tensors().values())
        copies = -(-COLD // self.bytes)
        packs = [packed]
        packs += [replace(packed, words=packed.words.clone()) for _ in range(copies)]
        self.linears = [PackedLinear(one, None, shape.epilogue, dtype) for one in packs]
        self.x = {b: self._random(rows, shape.k) for b, rows in COUNTS.items()}
        self.other = {
            b: self._random(rows, shape.n) if shape.epilogue == "add" else None
            for b, rows in COUNTS.items()
        }
        self.exact: dict[int, Tensor] = {}

    def _random(self, *size: int) -> Tensor:
        return torch.randn(*size, device="cuda", dtype=self.dtype)

    def candidates(self, bucket: int) -> list[PackedPlan]:
        return list(dict.fromkeys(candidates(self.linears[0].packed.layout, self.shape, bucket)))

    def call(self, linear: PackedLinear, bucket: int, plan: PackedPlan) -> Tensor:
        linear.use({bucket: plan})
        other = self.other[bucket]
        return linear(self.x[bucket], other if other is None else other.clone())

    def build(self, bucket: int, plan: PackedPlan) -> None:
        with torch.inference_mode():
            one = self.linears[0]
            self.call(PackedLinear(one.packed, None, one.epilogue, self.dtype), bucket, plan)

    def error(self, bucket: int, plan: PackedPlan) -> float:
        if bucket not in self.exact:
            exact = self.x[bucket].float() @ self.dense.float().t()
            if self.shape.silu:
                gate, up = exact.chunk(2, dim=-1)
                exact = torch.nn.functional.silu(gate) * up
            other = self.other[bucket]
            self.exact[bucket] = exact if other is None else exact + other
        exact = self.exact[bucket]
        found = self.call(self.linears[0], bucket, plan).float()
        return float((found - exact).abs().max() / exact.abs().max())

    def time(self, bucket: int, plan: PackedPlan) -> float:
        for linear in self.linears:
            linear.use({bucket: plan})
        x, other = self.x[bucket], self.other[bucket]
        return timed([partial(one, x, other) for one in self.linears])


def candidates(layout: Layout, shape: Shape, bucket: int) -> Iterator[PackedPlan]:
    """What is worth measuring, the rule of thumb first; some twice."""
    yield rule_of_thumb(layout, shape.n, shape.epilogue, bucket, True)
    for plan in _gemv(layout) if bucket == 1 else _skinny(layout.bits, bucket):
        programs = -(-shape.n // plan.block_n) * plan.split_k
        if plan.split_k == 1 or programs <= 800:
            yield plan
    if bucket >= 64:
        yield EXPAND


def rounded_candidates(layout: Layout, shape: Shape, rows: int) -> Iterator[PackedPlan]:
    """The same for inputs of 8 bits."""
    yield rounded_plan(layout, shape.n, shape.epilogue, rows, True)
    for block_n, block_k, warps, stages, split in (
        *((64, 256, 4, 4, 1), (64, 256, 4, 4, 2), (64, 256, 4, 6, 1), (64, 128, 4, 6, 2)),
        *((64, 128, 4, 4, 1), (128, 128, 4, 4, 1), (128, 128, 8, 6, 1), (128, 256, 8, 3, 1)),
        *((64, 256, 4, 4, 4), (64, 128, 4, 6, 1), (64, 256, 4, 3, 2), (64, 128, 4, 4, 4)),
    ):
        if split == 1 or -(-shape.n // block_n) * split <= 800:
            yield PackedPlan("skinny", block_n, block_k, warps, stages, split)


def timed(calls: list[Any], replays: int = 4) -> float:
    """Microseconds of one of the calls, in a chain of all of them."""
    count = -(-CALLS // len(calls)) * len(calls)
    graph = torch.cuda.CUDAGraph()
    calls[0]()
    with torch.cuda.graph(graph):
        for index in range(count):
            calls[index % len(calls)]()
    graph.replay()
    spans = []
    for _ in range(replays):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        spans.append(start.elapsed_time(end))
    return min(spans) * 1e3 / count


def _gemv(layout: Layout) -> Iterator[PackedPlan]:
    of_float8 = (
        *((4, 2048, 4), (2, 2048, 2), (16, 1024, 8), (8, 1024, 4), (4, 1024, 2), (2, 1024, 2)),
        *((16, 1024, 4), (8, 2048, 8), (8, 1024, 2)),
    )
    of_words = (
        *((2, 256, 2), (4, 256, 2), (8, 256, 2), (4, 128, 1), (8, 128, 1), (4, 512, 4)),
        *((8, 512, 4), (2, 128, 1), (4, 512, 2), (2, 512, 4)),
    )
    half = layout.bits in (2, 4, 8) and not layout.table
    for block_n, block_k, warps in of_words if layout.bits else of_float8:
        yield PackedPlan("gemv", block_n, block_k, warps, half=half)


def _skinny(bits: int, bucket: int) -> Iterator[PackedPlan]:
    high = bucket >= 64
    forms = [(64, 4, True), (128, 4, True), (64, 4, False), (32, 4, False), (32, 2, False)]
    if high:
        forms = [(64, 4, True), (128, 4, True), (128, 8, True), (64, 4, False)]
    for block_n, warps, swap in forms:
        for split in (1, 2, 4) if block_n < 128 else (1,):
            if bits:
                for stages, exact in ((3, True), (4, True), (3, False)):
                    yield PackedPlan("skinny", block_n, 64, warps, stages, split, swap, exact)
            else:
                for block_k, stages in ((128, 4), (256, 3), (256, 4)):
                    yield PackedPlan("skinny", block_n, block_k, warps, stages, split, swap)


def tune(subject: Subject, buckets: list[int], keep: int) -> Iterator[dict[str, Any]]:
    started = time.monotonic()
    todo = [(b, plan) for b in buckets for plan in subject.candidates(b)]
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda item: subject.build(*item), todo))
    torch.cuda.synchronize()
    built = time.monotonic() - started
    for bucket in buckets:
        found = []
        for plan in subject.candidates(bucket):
            error = subject.error(bucket, plan)
            if not error <= WORST:
                raise RuntimeError(f"{subject.kind} {subject.shape} {plan}: error {error:.3g}")
            found.append((subject.time(bucket, plan), plan))
        found.sort(key=lambda entry: entry[0])
        shape = subject.shape
        for us, plan in found[:keep]:
            print(
                f"{subject.kind:10} {shape.epilogue:8} {shape.n:6} x {shape.k:<5} rows {bucket:3}: "
                f"{us:7.2f} us, {subject.bytes / us / 1e6:.2f} TB/s; {plain(plan)}",
                flush=True,
            )
        yield {
            "kind": kind_of(subject.linears[0].packed.layout),
            "n": shape.n,
            "k": shape.k,
            "epilogue": shape.epilogue,
            "rows": bucket,
            "plan": plain(found[0][1]),
            "us": round(found[0][0], 2),
        }
    print(f"  {len(todo)} candidates, {built:.0f} s to build, {time.monotonic() - started:.0f} s")


def rounded_products(kind: str, shape: Shape, rows: int) -> None:
    """Own FP8 products beside torch's, and rounding inputs, in microseconds."""
    weight = weight_of(kind, shape.n, shape.k)
    packed = pack(weight)
    layout, silu = packed.layout, shape.silu
    packs = [packed]
    copies = -(-COLD // packed.words.nbytes)
    packs += [replace(packed, words=packed.words.clone()) for _ in range(copies)]
    x = torch.randn(rows, shape.k, device="cuda", dtype=torch.bfloat16)
    n = shape.n // 2 if silu else shape.n
    values, scales = rounded(x, packed.words.dtype, 2, layout.group)
    arrived = torch.zeros(4096, dtype=torch.int32, device="cuda")
    y = torch.empty(rows, n, device="cuda", dtype=torch.bfloat16)
    best = []
    for plan in dict.fromkeys(rounded_candidates(layout, shape, rows)):
        if tiles(plan, n, silu) * -(-rows // tile_of(rows)) > 4096:
            continue

        def call(one: Any, plan: PackedPlan = plan) -> None:
            operands = (None, None, None, y, arrived, silu, 2)
            packed_skinny(plan, tile_of(rows), values, one, *operands, scales)

        best.append((timed([partial(call, one) for one in packs]), plan))
    first = best[0][0]
    best.sort(key=lambda entry: entry[0])
    times = {"rule": first, "own": best[0][0]}
    times["rounding"] = timed([lambda: rounded(x, packed.words.dtype, 2, layout.group)])
    if layout.group == 0:
        of_rows = weight.by_channel().scales.view(1, -1)  # type: ignore[union-attr]
        times["torch"] = timed(
            [
                lambda one=one: torch._scaled_mm(
                    values, one.words.t(), scales, of_rows, out_dtype=torch.bfloat16
                )
                for one in packs
            ]
        )
    shown = ", ".join(f"{name} {us:.2f}" for name, us in times.items())
    print(f"{kind:10} W8A8 {shape.n:6} x {shape.k:<5} rows {rows:3}: {shown}; {plain(best[0][1])}")


def plain(plan: PackedPlan) -> dict[str, Any]:
    """What differs from a PackedPlan's defaults."""
    defaults = asdict(EXPAND)
    return {k: v for k, v in asdict(plan).items() if k == "kind" or v != defaults[k]}


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    """Adds the rows to the table at ``path``, in place of older ones of the same shapes."""
    table = json.loads(path.read_text()) if path.exists() else {"plans": []}

    def key(row: dict[str, Any]) -> tuple[Any, ...]:
        return row["kind"], row["n"], row["k"], row["epilogue"], row["rows"]

    merged = {key(row): row for row in (*table["plans"], *rows)}
    lines = ",\n".join(json.dumps(row) for row in merged.values())
    head = {
        "device": torch.cuda.get_device_name(),
        "measured": f"benchmarks/gpu/tune_quantized.py and step.py, torch {torch.__version__}",
    }
    path.write_text(f'{json.dumps(head)[:-1]}, "plans": [\n{lines}\n]}}\n')


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="llama-8b")
    parser.add_argument("--kinds", default="float8,int4")
    parser.add_argument("--buckets", default="1,16,64")
    parser.add_argument("--rounded", default="", help="rows of products of FP8 to measure")
    parser.add_argument("--seconds", type=float, default=120, help="start no shape after so many")
    parser.add_argument("--keep", type=int, default=3, help="candidates to print")
    parser.add_argument("--output", type=Path, default=TABLE)
    options = parser.parse_args()
    started = time.monotonic()
    rows: list[dict[str, Any]] = []
    buckets = [int(bucket) for bucket in options.buckets.split(",") if bucket]
    for kind in options.kinds.split(","):
        for shape in shapes_of(options.model)[:4]:
            if time.monotonic() - started > options.seconds:
                print(f"time is over: {kind} {shape}")
                continue
            for count in filter(None, options.rounded.split(",")):
                rounded_products(kind, shape, int(count))
            if buckets:
                rows += tune(Subject(kind, shape, torch.bfloat16), buckets, options.keep)
                write(options.output, rows)
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
