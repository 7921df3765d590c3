"""Octavo's kernels against torch alone where a CPU has AVX2 and nothing newer.

    python -m benchmarks.cpu_avx2 [--repetitions 3]

On a newer CPU torch, oneDNN and MKL are told to go no further, and octavo's kernels are chosen as
if there were nothing else. FP32, the demo model's BF16 twin and its Q4_1 file; prompts and what
counts are those of benchmarks.cpu. Writes benchmarks/results/cpu_avx2.json.
"""

from __future__ import annotations

import argparse
import os
import statistics
from contextlib import ExitStack

from rich.console import Console
from rich.table import Table

from benchmarks import cpu_workload as workload
from benchmarks.cpu import TESTS, prompts_of, run_phases
from benchmarks.cpu_peers import in_turn, settle
from benchmarks.protocol import Subject
from benchmarks.report import save
from benchmarks.subjects import command
from tests.fixtures import models

LIMITS = {
    "ATEN_CPU_CAPABILITY": "avx2",
    "ONEDNN_MAX_CPU_ISA": "AVX2",
    "MKL_ENABLE_INSTRUCTIONS": "AVX2",
}
SUBJECTS = {  # kind -> model
    "octavo-avx2": "G-bf16",
    "octavo-avx2-groups": "G",
    "octavo-torch": "G-bf16",
}
WORKLOADS = ("decode", "prefill", "mixed")
console = Console()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repetitions", type=int, default=3)
    options = parser.parse_args()
    os.environ.update(LIMITS)  # of the subjects' processes
    tests = [test for test in TESTS if test.name in WORKLOADS]
    turns: dict[str, list[dict[str, float]]] = {test.name: [] for test in tests}
    with ExitStack() as stack:
        subjects = {
            kind: stack.enter_context(Subject(command(kind, models.path(model))))
            for kind, model in SUBJECTS.items()
        }
        for subject in subjects.values():
            subject.run(workload.warm_up())
        for repetition in range(options.repetitions):
            for test in tests:
                prompts, turn = prompts_of(test, repetition), {}
                for kind in in_turn(list(subjects), repetition):
                    settle(subjects)
                    turn[kind] = test.measure(run_phases(subjects[kind], test, prompts, 1))
                turns[test.name].append(turn)
                console.print(f"{repetition + 1} {test.figure}: {turn}")
    table = Table("figure", *SUBJECTS, "ratio, dense", "ratio, groups")
    results = {}
    for test in tests:
        median = {kind: statistics.median(t[kind] for t in turns[test.name]) for kind in SUBJECTS}
        ratio = {
            kind: statistics.median(t[kind] / t["octavo-torch"] for t in turns[test.name])
            for kind in SUBJECTS
        }
        results[test.name] = {
            "figure": test.figure,
            "unit": test.unit,
            "median": median,
            "ratio": ratio,
            "repetitions": turns[test.name],
        }
        shown = [f"{value:.3g}" for value in median.values()]
        rates = [f"{ratio[kind]:.2f}" for kind in ("octavo-avx2", "octavo-avx2-groups")]
        table.add_row(f"{test.figure}, {test.unit}", *shown, *rates)
    console.print(table)
    console.print(f"saved {save('cpu_avx2', {'limits': LIMITS, 'tests': results})}")


if __name__ == "__main__":
    main()
