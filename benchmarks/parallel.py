"""What dividing a model costs and gives on the cores of this machine.

    python -m benchmarks.parallel [--model PATH] [--repetitions 2]

The same requests through ``octavo serve`` with one process, tensor parallelism, a pipeline, and
replicas, the same cores for each: one stream, sixteen, and long prompts. Every repetition starts
all of them in turn. Then all-reduces of two processes by shared memory and by gloo. Writes
benchmarks/results/parallel.json.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import re
import statistics
import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.cpu_workload import Work
from benchmarks.gpu.serve import bench
from benchmarks.report import save
from tests.fixtures import models
from tests.fixtures.server import Server, launch

WAYS = {
    "one": [],
    "tensor parallel 2": ["-tp", "2"],
    "pipeline 2": ["-pp", "2"],
    "replicas 2": ["-dp", "2"],
}
SELF_TEST = re.compile(r"all-reduce of 8 KiB (\d+) us, of 16 MiB ([\d.]+) GB/s")
ROUNDS = 20
VOCABULARY = 49_000  # ids below this are ordinary in SmolLM2's


@dataclass(frozen=True)
class Row:
    """``count`` requests, ``streams`` at a time."""

    name: str
    count: int
    streams: int
    prompt: int
    output: int

    def work(self, repetition: int) -> list[Work]:
        rng = np.random.default_rng((repetition, self.prompt, self.streams))
        ids = rng.integers(100, VOCABULARY, (self.count, self.prompt)).tolist()
        return [Work(prompt, self.output) for prompt in ids]


ROWS = (
    Row("1 stream, 128 in, 64 out", 2, 1, 128, 64),
    Row("16 streams, 128 in, 64 out", 16, 16, 128, 64),
    Row("prompts of 1,024 alone", 4, 4, 1024, 1),
)


def measured(server: Server, repetition: int) -> dict[str, float]:
    """Of each row tokens per second: of prompts where a row is of prompts alone."""
    found = {}
    for row in ROWS:
        told = bench(server.url, row.work(repetition), row.streams)
        assert told["failed"] == 0
        total = row.count * (row.output if row.output > 1 else row.prompt)
        found[row.name] = total / told["duration"]
    return found


def figures_of(flags: list[str], model: str, repetition: int) -> dict[str, Any]:
    server = launch(model, *flags, "--max-model-len", "2048", "--disable-uvicorn-access-log")
    try:
        server.wait_ready(180.0)
        found: dict[str, Any] = {"rows": measured(server, repetition)}
        if links := SELF_TEST.findall(server.log):
            small, large = links[0]
            found["all_reduce"] = {"8 KiB, us": float(small), "16 MiB, GB/s": float(large)}
        bubbles = [v for k, v in server.metrics().items() if "bubble" in k]
        if "-pp" in flags and bubbles:
            found["bubble_fraction"] = bubbles[0]
        server.stop()
    finally:
        server.kill()
    return found


def best(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Of a way's runs the best of each row; the rest as the last one told it."""
    rows = {}
    for row in ROWS:
        rates = [run["rows"][row.name] for run in runs]
        rows[row.name] = {"tokens_per_second": max(rates), "all": rates}
    return {**runs[-1], "rows": rows}


def rank_of_two(rank: int, ports: Any, told: Any) -> None:
    """Times all-reduces by memory and by gloo in turns; rank 0 tells each one's seconds."""
    import torch

    from octavo import parallel

    torch.set_num_threads(1)
    store = parallel.open_store("127.0.0.1") if rank == 0 else None
    if store is not None:
        ports.put(store.port)
    port = 0 if store is not None else ports.get()
    place = parallel.Place(rank, 2, local=rank, num_local=2)
    world = parallel.meet(place, "127.0.0.1", port, torch.device("cpu"), store)
    shared = world.tensor
    assert shared.transport == "shared memory", shared.transport
    ways = {"shared memory": shared, "gloo": parallel.Comm(shared._group, shared.ranks)}
    found: dict[str, dict[str, list[float]]] = {way: {"small": [], "large": []} for way in ways}
    for _ in range(ROUNDS):
        for way, comm in ways.items():
            for name, size, count in (("small", 2 << 10, 100), ("large", 4 << 20, 5)):
                x = torch.zeros(size)
                for _ in range(count):
                    began = time.perf_counter()
                    comm.all_reduce(x)
                    found[way][name].append(time.perf_counter() - began)
    if rank == 0:
        told.put(found)
    parallel.part()


def all_reduces() -> dict[str, dict[str, Any]]:
    """Of two processes: the median of single ones, and what the fastest tenth took at most: other
    work on the machine is least in that."""
    context = multiprocessing.get_context("spawn")
    ports, told = context.Queue(), context.Queue()
    ranks = [context.Process(target=rank_of_two, args=(rank, ports, told)) for rank in range(2)]
    for process in ranks:
        process.start()
    times = told.get(timeout=120)
    for process in ranks:
        process.join(60)
    return {way: figures(found["small"], found["large"]) for way, found in times.items()}


def figures(small: list[float], large: list[float]) -> dict[str, float]:
    def fastest(times: list[float]) -> float:
        return sorted(times)[len(times) // 10]

    return {
        "8 KiB, us": 1e6 * statistics.median(small),
        "8 KiB, us, fastest tenth": 1e6 * fastest(small),
        "16 MiB, GB/s": (16 << 20) / 1e9 / statistics.median(large),
        "16 MiB, GB/s, fastest tenth": (16 << 20) / 1e9 / fastest(large),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default=None, help="default: SmolLM2-135M in BF16")
    parser.add_argument("--repetitions", type=int, default=2)
    options = parser.parse_args()
    model = options.model or str(models.path("G-bf16"))
    links, loads = all_reduces(), []
    print(links)
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in WAYS}
    for repetition in range(options.repetitions):
        for name, flags in WAYS.items():
            runs[name].append(figures_of(flags, model, repetition))
            print(repetition, name, runs[name][-1], os.getloadavg()[0], flush=True)
        ways = {name: best(found) for name, found in runs.items()}
        loads.append(os.getloadavg()[0])
        told = {
            "model": options.model or "SmolLM2-135M BF16",
            "load": loads,  # after each repetition; this benchmark by itself makes 2 to 3
            "busy": max(loads) > 4,
            "all_reduce": links,
            "ways": ways,
        }
        file = save("parallel", told)  # what there is, should the next one not end
    for name, way in ways.items():
        for row, figures in way["rows"].items():
            share = figures["tokens_per_second"] / ways["one"]["rows"][row]["tokens_per_second"]
            print(f"{name:18} {row:28} {figures['tokens_per_second']:8.1f} tok/s  {share:.2f} x")
    print(f"saved {file}")


if __name__ == "__main__":
    main()
