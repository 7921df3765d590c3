"""What speculation gives on a GPU where a scripted share of guesses counts as right.

    python -m benchmarks.gpu.speculation [--model llama-8b] [--rates 0.7 0.0] [--rows 1 32]

With random weights nothing can be guessed, so a script says which guesses are right, by a hash of
slot and position; everything else is done as always. One engine without speculation, before and
after, and one for each rate, up to 5 guesses; decoded tokens a second, of the time between a short
run and a long one, and what a profiler says of the host's part: time in which the GPU had nothing
to do. Writes benchmarks/results/gpu_speculation.json.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.cpu_workload import Work
from benchmarks.gpu.subject import run
from benchmarks.gpu.workload import model_directory, settings_of
from benchmarks.report import gpus, save
from octavo import LLM
from octavo.model.shard import TensorParallel
from octavo.speculation import Speculating
from octavo.worker import cuda_runner
from octavo.worker.guessing import Guessing

PROMPT, SHORT, LONG, MOST = 128, 64, 320, 5
WARM_UP = 96


def script(rate: float) -> None:
    """Engines made from now on count guesses as right at this rate."""

    def guessing(wanted: Speculating, ranks: TensorParallel) -> Guessing:
        return replace(plain(wanted, ranks), rate=rate)

    plain = PLAIN
    cuda_runner.guessing = guessing


PLAIN = cuda_runner.guessing


def prompts(rows: int, repetition: int) -> list[list[int]]:
    return [
        [(7919 * row + 104_729 * repetition + 31 * i) % 50_000 for i in range(PROMPT)]
        for row in range(rows)
    ]


def decode_rate(llm: LLM, rows: int, repetition: int) -> float:
    """Tokens a second between a run of SHORT tokens a row and one of LONG."""
    seconds = [
        run(llm, [Work(prompt, count) for prompt in prompts(rows, repetition)])
        for count in (SHORT, LONG)
    ]
    return rows * (LONG - SHORT) / (seconds[1] - seconds[0])


def measure(model: str, rate: float | None, rows: list[int], repetitions: int) -> dict[str, Any]:
    settings: dict[str, Any] = {**settings_of(model), "max_num_seqs": 64}
    if rate is not None:
        script(rate)
        settings |= {"spec_method": "ngram", "num_speculative_tokens": MOST}
    found: dict[str, Any] = {"rate": rate, "rows": {}}
    with closing(LLM(str(model_directory(model)), **settings)) as llm:
        for count in rows:
            run(llm, [Work(prompt, WARM_UP) for prompt in prompts(count, -1)])
            before = llm.stats
            rates = [decode_rate(llm, count, repetition) for repetition in range(repetitions)]
            after = llm.stats
            row: dict[str, Any] = {"tokens_per_second": rates}
            row["median"] = statistics.median(rates)
            for name in ("num_steps", "num_draft_tokens", "num_accepted_drafts"):
                row[name] = getattr(after, name) - getattr(before, name)
            row["draft_length"] = after.draft_length
            row["profile"] = profile(llm, count)
            found["rows"][count] = row
            print(rate, count, {k: v for k, v in row.items() if k != "tokens_per_second"})
    return found


def profile(llm: LLM, rows: int) -> dict[str, float]:
    """Of steps of decoding rows: the part of the time in which the GPU does nothing."""
    with tempfile.TemporaryDirectory() as directory:
        llm.start_profile(directory)
        run(llm, [Work(prompt, SHORT) for prompt in prompts(rows, 0)])
        found = llm.stop_profile()
    Path(found.trace).unlink(missing_ok=True)
    return {
        "steps": found.num_steps,
        "span_ms": 1e3 * found.span,
        "idle_share": found.idle / found.span,
        "longest_gap_ms": 1e3 * found.longest_gap,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="llama-8b")
    parser.add_argument("--rates", type=float, nargs="+", default=[0.7, 0.0])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 32])
    parser.add_argument("--repetitions", type=int, default=3)
    options = parser.parse_args()
    ways = [None, *options.rates, None]
    runs = [measure(options.model, way, options.rows, options.repetitions) for way in ways]
    ratios = {}
    for found in runs[1:-1]:
        for count in options.rows:
            plain = max(run["rows"][count]["median"] for run in (runs[0], runs[-1]))
            ratios[f"rate {found['rate']}, {count} rows"] = found["rows"][count]["median"] / plain
    print(ratios)
    facts = {"gpus": gpus(), "model": options.model, "most": MOST}
    print(save("gpu_speculation", {**facts, "ratios": ratios, "runs": runs}))


if __name__ == "__main__":
    main()
