"""What a KV cache in 8 bits gives on a GPU: seconds of a decode step, and tokens held.

    python -m benchmarks.gpu.kv_cache [--model llama-8b] [--rows 256] [--context 1024]

One engine with random weights for each of ``--kv-cache-dtype``'s values. All prompts are cached by
a first run; two more decode from them, a short and a long one, and their difference is steps alone,
of ``--context`` tokens a row in the middle. Writes benchmarks/results/gpu_kv_cache.json.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from contextlib import closing
from typing import Any

from benchmarks.cpu_workload import Work
from benchmarks.gpu.subject import run
from benchmarks.gpu.workload import model_directory, settings_of
from benchmarks.report import ROOT, gpus, save
from octavo import LLM

KINDS = ("auto", "fp8", "fp8_e5m2", "int8")
SHORT, LONG = 16, 144  # tokens decoded


def measure(model: str, kind: str, rows: int, context: int, repetitions: int) -> dict[str, Any]:
    length = context - (SHORT + LONG) // 2
    prompts = [[(7919 * row + 31 * i) % 50_000 for i in range(length)] for row in range(rows)]

    def seconds(llm: LLM, tokens: int) -> float:
        return run(llm, [Work(prompt, tokens) for prompt in prompts])

    settings = {**settings_of(model), "kv_cache_dtype": kind, "max_num_seqs": max(rows, 8)}
    with closing(LLM(str(model_directory(model)), **settings)) as llm:
        prompt_seconds = seconds(llm, 1)
        seconds(llm, SHORT)
        short = [seconds(llm, SHORT) for _ in range(repetitions)]
        long = [seconds(llm, LONG) for _ in range(repetitions)]
        info = llm.info
    step = (statistics.median(long) - statistics.median(short)) / (LONG - SHORT)
    tokens = info.num_blocks * info.block_size
    return {
        "kv_cache_dtype": kind,
        "step_ms": 1e3 * step,
        "prompt_seconds": prompt_seconds,
        "cache_tokens": tokens,
        "bytes_per_token": info.kv_cache_bytes / tokens,
        "reason": info.reasons.get("kv_cache_dtype", ""),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="llama-8b")
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--only", nargs="*", choices=KINDS, default=KINDS)
    parser.add_argument("--kind", choices=KINDS, help="measures that one here and prints JSON")
    options = parser.parse_args()
    shape = (options.rows, options.context, options.repetitions)
    if options.kind:
        print(json.dumps(measure(options.model, options.kind, *shape)))
        return
    found = []
    for kind in options.only:
        command = [sys.executable, "-m", "benchmarks.gpu.kv_cache", "--kind", kind]
        command += [f"--model={options.model}", f"--rows={options.rows}"]
        command += [f"--context={options.context}", f"--repetitions={options.repetitions}"]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, cwd=ROOT, check=True)
        found.append(json.loads(done.stdout.splitlines()[-1]))
        found[-1]["speedup"] = found[0]["step_ms"] / found[-1]["step_ms"]
        print(found[-1], flush=True)
    facts = {"gpus": gpus(), "model": options.model, "rows": options.rows}
    save("gpu_kv_cache", {**facts, "context": options.context, "results": found})


if __name__ == "__main__":
    main()
