"""What a step costs the host apart from its plan's computation: the engine and ``LLM`` around it.

    python -m benchmarks.engine_overhead [--running 1 8 64 256] [--save]

``LLM.generate`` runs on an executor that answers at once with made-up tokens (its own time is taken
off), so all that is left is scheduling, telling and assembling. A step: steady decode, median of
windows of 32 steps, on prompts of some 40 tokens. A request: from its prompt's ids to its first
plan, 2,112 tokens long, everything cached. No torch, no device.
"""

from __future__ import annotations

import argparse
import time
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np

import octavo.engine.start
from benchmarks.gpu.workload import model_directory
from benchmarks.report import save
from octavo import LLM, SamplingParams
from octavo.config import EngineConfig
from octavo.core.plan import SAMPLE, StepPlan, StepResult
from octavo.engine.engine import Engine
from octavo.engine.messages import EngineInfo

WINDOW = 32  # steps
OUTPUT = 800
LONG_PROMPT = 2112
VOCABULARY = 40_000
NO_ROWS = np.zeros(0, dtype=np.int32)


class InstantExecutor:
    """Draws whatever comes next in a list of random ids. ``times``: of each plan, when it came and
    what it took here."""

    num_pending = 0
    num_stages = 1
    problem = ""

    def __init__(self) -> None:
        self.times: list[tuple[float, float]] = []
        self._tokens = np.random.default_rng(0).integers(10, VOCABULARY, (1 << 16, 1), np.int32)
        self._at = 0
        self._results: deque[StepResult] = deque()

    def submit(self, plan: StepPlan) -> None:
        began = time.perf_counter()
        count = plan.num_rows
        self._at = (self._at + count) % (len(self._tokens) - count)
        drawn = self._tokens[self._at : self._at + count]
        accepted = (plan.flags & SAMPLE).astype(np.int32)
        self._results.append(StepResult(plan.step, drawn, accepted, NO_ROWS))
        self.times.append((began, time.perf_counter() - began))

    def collect(self) -> StepResult:
        return self._results.popleft()

    def idle(self) -> bool:
        return False

    def abandon(self) -> None:
        pass

    def shutdown(self) -> None:
        self._results.clear()


def instant_llm(max_num_seqs: int, block_size: int) -> tuple[LLM, InstantExecutor]:
    """An LLM whose engine computes nothing."""
    executor = InstantExecutor()
    length = 4096
    info = EngineInfo(
        model="instant",
        architecture="none",
        dtype="bfloat16",
        device="none",
        threads=1,
        vocab_size=VOCABULARY,
        max_model_len=length,
        eos_ids=[2],
        block_size=block_size,
        num_blocks=2 * max_num_seqs * length // block_size,
        kv_cache_bytes=1 << 30,
        weight_bytes=0,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=8192,
        implementations={},
        startup_seconds={},
        reasons={},
    )

    def start(config: EngineConfig, progress: Any) -> tuple[Engine, InstantExecutor]:
        return Engine(config, info, executor), executor

    original = octavo.engine.start.start_engine
    octavo.engine.start.start_engine = start  # type: ignore[assignment]
    try:
        path = str(model_directory("tiny"))
        return LLM(path, load_format="dummy", skip_tokenizer_init=True), executor
    finally:
        octavo.engine.start.start_engine = original


def run(llm: LLM, prompts: list[list[int]], output: int) -> float:
    """Seconds to answer all of them with so many tokens."""
    params = SamplingParams(temperature=0, max_tokens=output, ignore_eos=True, detokenize=False)
    began = time.perf_counter()
    answers = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
    seconds = time.perf_counter() - began
    assert all(len(answer.outputs[0].token_ids) == output for answer in answers)
    return seconds


def made(count: int, length: int, seed: int = 0) -> list[list[int]]:
    """Prompts of about that length, so that they do not all fill a block in the same step."""
    rng = np.random.default_rng(seed)
    return [rng.integers(10, VOCABULARY, length + i % 16).tolist() for i in range(count)]


def step_microseconds(llm: LLM, executor: InstantExecutor, num_running: int) -> float:
    """Median of the windows in which all requests run."""
    run(llm, made(num_running, 32), WINDOW)
    executor.times.clear()
    run(llm, made(num_running, 32, seed=1), OUTPUT)
    began, own = (np.array(column) for column in zip(*executor.times))
    steps = np.diff(began) - own[:-1]
    windows = steps[WINDOW : WINDOW + (OUTPUT - 2 * WINDOW) // WINDOW * WINDOW]
    return float(np.median(windows.reshape(-1, WINDOW).mean(axis=1)) * 1e6)


def request_microseconds(llm: LLM, num_requests: int, repetitions: int) -> float:
    """Best of the repetitions, all of whose prompts are cached."""
    prompts = made(num_requests, LONG_PROMPT)
    assert llm.reset_prefix_cache()
    seconds = [run(llm, prompts, 1) for _ in range(repetitions + 1)]
    return min(seconds[1:]) / num_requests * 1e6


def measure(num_running: int, repetitions: int, block_size: int = 64) -> dict[str, float]:
    """Microseconds; best of the repetitions."""
    llm, executor = instant_llm(max(num_running, 8), block_size)
    steps = [step_microseconds(llm, executor, num_running) for _ in range(repetitions)]
    request = request_microseconds(llm, num_running, repetitions)
    llm.close()
    return {"step": round(min(steps), 1), "request": round(request, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--running", nargs="*", type=int, default=[1, 8, 64, 256])
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--save", action="store_true", help=f"to {Path('benchmarks/results')}")
    options = parser.parse_args()
    found = {}
    for num_running in options.running:
        found[num_running] = figures = measure(num_running, options.repetitions)
        shown = f"step {figures['step']} us, request {figures['request']} us"
        print(f"running={num_running}: {shown}", flush=True)
    if options.save:
        print(f"saved {save('engine_overhead', {'microseconds': found})}")


if __name__ == "__main__":
    main()
