"""What dividing a model costs and gives on the cores of this machine.

    python -m benchmarks.parallel [--model PATH] [--repetitions 2]

The same requests through ``octavo serve`` with one process, tensor parallelism, a pipeline, and
replicas, the same cores for each: one stream, sixteen, and long prompts. On a CPU the ranks meet
through gloo, by loopback. Writes benchmarks/results/parallel.json.
"""

from __future__ import annotations

import argparse
import re
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
    Row("16 streams, 128 in, 64 out", 32, 16, 128, 64),
    Row("prompts of 1,024 alone", 8, 4, 1024, 1),
)


def measured(server: Server, rows: tuple[Row, ...], repetitions: int) -> dict[str, Any]:
    """Best of the repetitions, tokens per second: of prompts where a row is of prompts alone."""
    found = {}
    for row in rows:
        rates = []
        for repetition in range(repetitions):
            told = bench(server.url, row.work(repetition), row.streams)
            assert told["failed"] == 0
            total = row.count * (row.output if row.output > 1 else row.prompt)
            rates.append(total / told["duration"])
        found[row.name] = {"tokens_per_second": max(rates), "all": rates}
    return found


def figures_of(flags: list[str], model: str, repetitions: int) -> dict[str, Any]:
    server = launch(model, *flags, "--max-model-len", "2048", "--disable-uvicorn-access-log")
    try:
        server.wait_ready(180.0)
        found: dict[str, Any] = {"rows": measured(server, ROWS, repetitions)}
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


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default=None, help="default: SmolLM2-135M in BF16")
    parser.add_argument("--repetitions", type=int, default=2)
    options = parser.parse_args()
    model = options.model or str(models.path("G-bf16"))
    ways = {}
    for name, flags in WAYS.items():
        ways[name] = figures_of(flags, model, options.repetitions)
        for row, figures in ways[name]["rows"].items():
            share = figures["tokens_per_second"] / ways["one"]["rows"][row]["tokens_per_second"]
            print(f"{name:18} {row:28} {figures['tokens_per_second']:8.1f} tok/s  {share:.2f} x")
    print(
        f"saved {save('parallel', {'model': options.model or 'SmolLM2-135M BF16', 'ways': ways})}"
    )


if __name__ == "__main__":
    main()
