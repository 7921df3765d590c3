"""Microseconds of an engine's decode step, and which plans of packed linears make it shortest.

    python -m benchmarks.gpu.step [--kept fp8 gptq awq] [--rows 1 8] [--context 1024] [--tune]
    python -m benchmarks.gpu.step --kept bf16 --rows 256 [--kv-cache-dtype fp8]

Random weights; the step (begin, forward, logits, draw) is captured as the engine captures it and
replayed, so what is measured is the GPU alone; kept in benchmarks/results/gpu_step.json, of which
what was not measured this time stays. ``--tune``: the plan of each linear is replaced, in
all layers at once, by each candidate (tune_quantized.py), and the step is captured anew: what a
kernel leaves to its neighbours counts, which a chain of one linear does not show. The best of each
linear is kept while the next one is tried, and written as tune_quantized.py writes.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.gpu.tune_quantized import candidates, plain, rounded_candidates, write
from benchmarks.gpu.workload import SCHEMES, model_directory, settings_of
from benchmarks.report import RESULTS, gpus, save
from octavo.config import EngineConfig
from octavo.core.plan import SAMPLE, StepPlan
from octavo.flags import from_flags
from octavo.model.decoder import Model
from octavo.model.loader.load import load_model
from octavo.ops.triton.float8 import Float8Linear
from octavo.ops.triton.packed_plans import (
    ROUNDED,
    TABLE,
    PackedPlan,
    bucket_of,
    kind_of,
    tile_of,
)
from octavo.ops.triton.plans import Shape as LinearShape
from octavo.ops.triton.weight_only import PackedLinear
from octavo.worker.batch import order_rows
from octavo.worker.device_step import DeviceStep
from octavo.worker.device_tables import DeviceTables
from octavo.worker.graphs import Shape
from octavo.worker.slots import Slots

NAME = "gpu_step"
BLOCK_SIZE = 64
GAIN = 0.998  # of a step that another plan must reach to replace the one there


def load(shape: str, kept: str, *flags: tuple[str, Any]) -> Model:
    """A model of random weights on the GPU, kept as ``benchmarks.gpu.quantized`` keeps them."""
    path = model_directory(shape, kept)
    settings = {"model": str(path), **settings_of(shape), **dict(flags)}
    if kept not in ("bf16", *SCHEMES):
        settings["quantization"] = kept
    return load_model(path, from_flags(EngineConfig, settings), lambda *news: None, "cuda")


class Decode:
    """Decode steps of ``rows`` requests of ``context`` tokens each, on random keys and values."""

    def __init__(self, model: Model, rows: int, context: int) -> None:
        device, vocabulary = torch.device("cuda"), model.spec.vocab_size
        self.shape = Shape(rows)
        slots = Slots(rows, context, BLOCK_SIZE, vocabulary)
        width = slots.max_blocks
        tables = DeviceTables.allocate(rows, context, width, vocabulary, device)
        tables.history.random_(vocabulary)
        cache = model.allocate_cache(rows * width, BLOCK_SIZE)
        for layer in cache:
            layer.copy_(torch.randn(layer.shape, device=device))
        self.step = DeviceStep(model, cache, slots, tables, rows, rows, device)
        self.step.rehearse(self.shape)
        plan = _plan(rows, context, width)
        self.step.stage(plan, order_rows(plan), self.shape)

    def microseconds(self, replays: int = 24) -> float:
        """The median of the replays of a fresh capture."""
        self.step.compute(self.shape)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.step.compute(self.shape)
        return replayed(graph, replays)


def replayed(graph: torch.cuda.CUDAGraph, replays: int) -> float:
    """Microseconds of a replay: the median, after two."""
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(replays + 1)]
    for _ in range(2):
        graph.replay()
    for mark in marks[:-1]:
        mark.record()
        graph.replay()
    marks[-1].record()
    torch.cuda.synchronize()
    spans = [start.elapsed_time(end) for start, end in pairwise(marks)]
    return 1e3 * statistics.median(spans)


def _plan(rows: int, context: int, width: int) -> StepPlan:
    """Row i is slot i, with blocks from all over the cache, and computes its last token."""

    def column(value: int, dtype: type = np.int32) -> Any:
        return np.full(rows, value, dtype=dtype)

    none = np.zeros(0, dtype=np.int32)
    blocks = np.random.default_rng(0).permutation(rows * width).astype(np.int32)
    return StepPlan(
        step=0,
        slots=np.arange(rows, dtype=np.int32),
        num_tokens=column(1),
        starts=column(context - 1),
        flags=column(int(SAMPLE), np.uint8),
        block_starts=column(0),
        block_indptr=np.arange(rows + 1, dtype=np.int32) * width,
        block_ids=blocks,
        freed_slots=none,
        copies=none.reshape(0, 2),
        new_requests=[],
        new_indptr=np.zeros(1, dtype=np.int32),
        new_token_ids=none,
    )


class Alike:
    """The linears of all layers that have one shape, in a step of so many rows. ``bucket``: what a
    plan of theirs is for."""

    def __init__(self, shape: LinearShape, rows: int, first: PackedLinear | Float8Linear) -> None:
        self.shape, self.rows = shape, rows
        self.linears = [first]
        self.rounds = isinstance(first, Float8Linear) and first.rounds(rows)
        self.layout = first.packed.layout
        bucket = tile_of(rows) if self.rounds else bucket_of(rows)
        assert bucket is not None
        self.bucket, self.kind = bucket, ROUNDED if self.rounds else kind_of(self.layout)
        self.plan = self._of(first).plan(rows) if self.rounds else self._of(first).plans[bucket]

    def candidates(self) -> list[PackedPlan]:
        choices = rounded_candidates if self.rounds else candidates
        return list(dict.fromkeys(choices(self.layout, self.shape, self.bucket)))

    def _of(self, one: PackedLinear | Float8Linear) -> Any:
        return one if self.rounds or isinstance(one, PackedLinear) else one.plain

    def _use(self, one: Any, plan: PackedPlan) -> None:
        one.use((lambda rows: plan) if self.rounds else one.plans | {self.bucket: plan})

    def use(self, plan: PackedPlan) -> None:
        for one in self.linears:
            self._use(self._of(one), plan)

    def build(self, plan: PackedPlan) -> None:
        """Compiles the plan's kernel."""
        with torch.inference_mode():
            one = copy.copy(self._of(self.linears[0]))
            self._use(one, plan)
            x = torch.zeros(self.rows, self.shape.k, device="cuda", dtype=one.dtype)
            y = torch.zeros(self.rows, self.shape.n, device="cuda", dtype=one.dtype)
            one(x, y if self.shape.epilogue == "add" else None)


def alike(model: Model, rows: int) -> list[Alike]:
    """The packed linears of all layers, by shape."""
    found: dict[LinearShape, Alike] = {}
    for layer in model.layers:
        for linear in layer.linears():
            for one in getattr(linear.apply, "parts", ()):
                if isinstance(one, (PackedLinear, Float8Linear)):
                    packed = one.packed
                    key = LinearShape(packed.rows, packed.layout.inputs, one.epilogue)
                    if key in found:
                        found[key].linears.append(one)
                    else:
                        found[key] = Alike(key, rows, one)
    return list(found.values())


def tune(model: Model, decode: Decode) -> list[dict[str, Any]]:
    """The plans of the shortest step that was found, one linear after the other."""
    linears = alike(model, decode.shape.decode_rows)
    jobs = [(each, plan) for each in linears for plan in each.candidates()]
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda job: job[0].build(job[1]), jobs))
    best = decode.microseconds()
    print(f"  {len(jobs)} candidates; as chosen {best:.0f} us", flush=True)
    found = []
    for each in linears:
        shape, times = each.shape, []
        for plan in each.candidates():
            each.use(plan)
            times.append((decode.microseconds(), plan))
        times.sort(key=lambda entry: entry[0])
        name = f"{shape.epilogue:8} {shape.n:6} x {shape.k:<5}"
        for us, plan in times[:4]:
            print(f"  {name} {us:7.0f} us {plain(plan)}")
        if times[0][0] < GAIN * best:
            each.plan = times[0][1]
        each.use(each.plan)
        best = decode.microseconds()
        print(f"  {name} {best:7.0f} us kept {plain(each.plan)}", flush=True)
        row = {"kind": each.kind, "n": shape.n, "k": shape.k, "epilogue": shape.epilogue}
        row |= {"rows": each.bucket, "plan": plain(each.plan), "step_us": round(best)}
        found.append(row)
    return found


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shape", default="llama-8b")
    parser.add_argument("--kept", nargs="*", default=["bf16", "fp8", "gptq", "awq"])
    parser.add_argument("--rows", nargs="*", type=int, default=[1, 8])
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--kv-cache-dtype", choices=("auto", "fp8"), default="auto")
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--output", type=Path, default=TABLE, help="where plans are written")
    options = parser.parse_args()
    file, cache = RESULTS / f"{NAME}.json", options.kv_cache_dtype
    steps = json.loads(file.read_text())["steps"] if file.exists() else {}
    for kept in options.kept:
        model = load(options.shape, kept, ("kv_cache_dtype", cache))
        for rows in options.rows:
            decode = Decode(model, rows, options.context)
            if options.tune:
                write(options.output, tune(model, decode))
            us = decode.microseconds()
            print(f"{kept} {rows} rows: {us:.0f} us, {1e6 * rows / us:.0f} tok/s", flush=True)
            of_cache = "" if cache == "auto" else f", {cache} cache"
            name = f"{options.shape} {kept}{of_cache}, {rows} x {options.context}"
            steps[name] = {"us": round(us, 1), "tokens_per_second": round(1e6 * rows / us, 1)}
            save(NAME, {"gpus": gpus(), "steps": steps})
            del decode
        del model
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
