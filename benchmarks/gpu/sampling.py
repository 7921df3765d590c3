"""Time of a draw on one GPU: greedy, random, truncated, penalised; a graph replayed.

    python -m benchmarks.gpu.sampling [--vocab 128256] [--rows 1 8 64 256]

The logits lie in buffers that are used in turns and together exceed the GPU's L2 cache, so these
are times of logits read from memory; in a step the head has just written them. "flat": random
logits without a peak, whose nucleus holds most of the vocabulary and is searched in the whole row;
"peaked": p falls with the rank to the power of -2. Prints microseconds as JSON and writes
benchmarks/results/gpu_sampling.json.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

import numpy as np
import torch

from benchmarks.report import gpus, save
from octavo.core.plan import NewRequest
from octavo.types import SamplingParams
from octavo.worker.device_sampler import DeviceSampler
from octavo.worker.device_tables import DeviceTables
from octavo.worker.slots import Slots

CASES: dict[str, tuple[SamplingParams, bool, bool]] = {  # parameters, peaked, truncation launches
    "greedy": (SamplingParams(temperature=0.0), True, False),
    "greedy, in a graph for all": (SamplingParams(temperature=0.0), True, True),
    "greedy, penalties": (SamplingParams(temperature=0.0, repetition_penalty=1.1), True, False),
    "random": (SamplingParams(temperature=0.8), True, False),
    "top_p 0.95": (SamplingParams(temperature=0.8, top_p=0.95), True, True),
    "top_k 50": (SamplingParams(temperature=0.8, top_k=50), True, True),
    "top_k 20, top_p 0.95": (SamplingParams(temperature=0.6, top_k=20, top_p=0.95), True, True),
    "min_p 0.05": (SamplingParams(temperature=1.0, min_p=0.05), True, True),
    "all, penalties": (
        SamplingParams(temperature=0.8, top_k=50, top_p=0.95, min_p=0.01, presence_penalty=0.5),
        True,
        True,
    ),
    "top_p 0.95, flat": (SamplingParams(temperature=1.0, top_p=0.95), False, True),
    "top_k 20000, top_p 0.95, flat": (
        SamplingParams(temperature=1.0, top_k=20_000, top_p=0.95),
        False,
        True,
    ),
}
REPLAYS = 30
CACHE_BYTES = 100 << 20


class Subject:
    """Requests in ``rows`` slots, and logits of both kinds."""

    def __init__(self, rows: int, vocab: int) -> None:
        self.slots = Slots(rows, 64, 16, vocab)
        self.tables = DeviceTables.allocate(rows, 64, self.slots.max_blocks, vocab, "cuda")
        self.sampler = DeviceSampler(self.tables, self.slots, rows)
        self.rows = torch.arange(rows, dtype=torch.int32, device="cuda")
        self.positions = torch.full((rows,), 5, dtype=torch.int32, device="cuda")
        copies = max(1, CACHE_BYTES // (4 * rows * vocab))
        flat = torch.randn(copies, rows, vocab, device="cuda")
        ranks = torch.rand(vocab, device="cuda").argsort() + 1
        self.logits = {False: flat, True: flat * 0.5 - 2.0 * ranks.log()}

    def place(self, params: SamplingParams) -> None:
        count = len(self.rows)
        for slot in range(count):
            self.slots._place(NewRequest(slot, 4, params, seed=slot), np.arange(4, dtype=np.int32))
        self.sampler.place(np.arange(count, dtype=np.int32))

    def draw_all(self, peaked: bool, truncation: bool) -> int:
        buffers = self.logits[peaked]
        for logits in buffers:
            self.sampler.draw(logits, self.rows, self.positions, truncation=truncation)
        return len(buffers)


def measure(subject: Subject, peaked: bool, truncation: bool) -> dict[str, float]:
    """Microseconds of one draw: the best and the median of ``REPLAYS`` replays."""
    subject.draw_all(peaked, truncation)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        draws = subject.draw_all(peaked, truncation)
    graph.replay()
    times = []
    for _ in range(REPLAYS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(1000 * start.elapsed_time(end) / draws)
    return {"best": round(min(times), 2), "median": round(float(np.median(times)), 2)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--vocab", type=int, default=128256)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 64, 256])
    arguments = parser.parse_args()
    figures: dict[str, dict[int, Any]] = {name: {} for name in CASES}
    with torch.inference_mode():
        for rows in arguments.rows:
            subject = Subject(rows, arguments.vocab)
            for name, (params, peaked, truncation) in CASES.items():
                subject.place(params)
                figures[name][rows] = measure(subject, peaked, truncation)
            bandwidth = 4 * rows * arguments.vocab / figures["greedy"][rows]["best"] / 1e6
            figures["greedy"][rows]["TB/s"] = round(bandwidth, 2)
    told = {"gpus": gpus(), "vocab": arguments.vocab, "microseconds": figures}
    print(json.dumps(told, indent=1))
    save("gpu_sampling", told)


if __name__ == "__main__":
    main()
