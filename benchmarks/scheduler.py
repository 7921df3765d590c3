"""What scheduling costs: schedule + update per step in steady decode, prefix caching on.

    python benchmarks/scheduler.py [--stages 2] [--save benchmarks/results/scheduler.json]

Requests have staggered lengths, so in every step one row in sixteen crosses a block boundary, fills
a block (hashed and registered) and takes a new one. Two plans are in flight, results are made up.
With --stages as many plans are, each with its share of the rows.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import time
from collections import deque

import numpy as np

from octavo.core.block_pool import BlockPool, PrefixKeys, root_key
from octavo.core.plan import SAMPLE, StepPlan, StepResult
from octavo.core.request import Request
from octavo.core.scheduler import Limits, Scheduler
from octavo.types import SamplingParams


def result_of(plan: StepPlan, rng: np.random.Generator) -> StepResult:
    draws = plan.flags & SAMPLE
    tokens = rng.integers(10, 40_000, size=(plan.num_rows, 1), dtype=np.int32)
    return StepResult(plan.step, tokens, draws.astype(np.int32), np.zeros(0, dtype=np.int32))


def measure(num_running: int, steps: int, stages: int = 1) -> float:
    """Microseconds of schedule + update per step."""
    block_size, max_len = 16, 4096
    pool = BlockPool(num_running * max_len // block_size, block_size)
    limits = Limits(num_running, 8192, max_len, stages=stages)
    scheduler = Scheduler(limits, pool, eos_ids=[2], clock=time.monotonic)
    rng = np.random.default_rng(0)
    for handle in range(num_running):
        prompt = rng.integers(10, 40_000, size=32 + handle % block_size, dtype=np.int32)
        chain = PrefixKeys(root_key(), block_size)
        params = SamplingParams(temperature=0.0)
        scheduler.add(Request(handle, prompt, params, steps + 100, chain=chain))
    plans: deque[StepPlan] = deque()
    spent, counted = 0.0, 0
    while counted < steps:
        started = time.perf_counter()
        while (plan := scheduler.schedule()) is not None:
            plans.append(plan)
        planned = time.perf_counter()
        result = result_of(plans.popleft(), rng)
        resumed = time.perf_counter()
        scheduler.update(result)
        ended = time.perf_counter()
        others = max(1, stages - 1)  # in flight
        rows = int(result.num_accepted.sum())
        if num_running // stages <= rows <= -(-num_running // stages) and len(plans) == others:
            spent += planned - started + ended - resumed
            counted += 1
    return spent / counted * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=1600)
    parser.add_argument("--stages", type=int, default=1, help="of a pipeline")
    parser.add_argument("--save")
    arguments = parser.parse_args()
    figures = {}
    for num_running in (1, 64, 256, 1024):
        if num_running < arguments.stages:
            continue  # some stages would have nothing to do
        figures[num_running] = round(measure(num_running, arguments.steps, arguments.stages), 1)
        print(f"running={num_running} us_per_step={figures[num_running]}", flush=True)
    if arguments.save:
        commit = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True
        ).stdout.strip()
        record = {
            "command": "python benchmarks/scheduler.py",
            "commit": commit,
            "machine": platform.processor() or platform.machine(),
            "python": platform.python_version(),
            "steps": arguments.steps,
            "us_per_step": figures,
        }
        with open(arguments.save, "w") as file:
            json.dump(record, file, indent=1)


if __name__ == "__main__":
    main()
