"""Octavo against transformers on this CPU, interleaved, on the demo model's BF16 twin.

    python -m benchmarks.cpu [--repetitions 3] [--only mixed prefill]

Every repetition runs all subjects in turns on the same fresh prompts; what counts is the ratio
within a repetition, of which the median is reported. Writes benchmarks/results/cpu.json.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks import cpu_workload as workload
from benchmarks.protocol import Subject, Timing
from benchmarks.report import save
from benchmarks.subjects import command
from tests.fixtures import models, server

console = Console()


@dataclass(frozen=True)
class Test:
    """A workload and its figure. ``phases`` run one after the other, the last one counts; where
    the peer has no cache, one phase is all it runs."""

    name: str
    figure: str
    unit: str
    phases: list[Callable[[int], list[workload.Work]]]
    measure: Callable[[Timing], float]
    peer: str = "transformers"
    subject: str = "octavo"
    target: float = 0.0  # of the ratio subject / peer
    lower_is_better: bool = False
    peer_phases: int = 1  # the last so many


def _rate(timing: Timing) -> float:
    return timing.output_rate


def _prefill_rate(timing: Timing) -> float:
    return 1024 / timing.first_tokens[0]


def _decode_rate(timing: Timing) -> float:
    return timing.decode_rate


def _seconds(timing: Timing) -> float:
    return timing.seconds


def _warm(repetition: int) -> list[workload.Work]:
    return workload.shared(repetition, phase=1)


TESTS = [
    Test("mixed", "32 mixed requests", "output tok/s", [workload.mixed], _rate, target=4.5),
    Test("prefill", "prefill of 1,024", "tok/s", [workload.prefill], _prefill_rate, target=1.4),
    Test("decode", "decode at batch 1", "tok/s", [workload.batch_1], _decode_rate, target=1.6),
    Test(
        "cold-prefix",
        "16 sharing a 1,000 prefix, cold",
        "s",
        [workload.shared],
        _seconds,
        lower_is_better=True,
    ),
    Test(
        "warm-prefix",
        "16 sharing a 1,000 prefix, warm",
        "s",
        [workload.shared, _warm],
        _seconds,
        target=0.2,
        lower_is_better=True,
    ),
    Test(
        "server",
        "32 mixed requests, server (streamed) against offline",
        "output tok/s",
        [workload.mixed],
        _rate,
        peer="octavo",
        subject="octavo-server",
        target=0.95,
    ),
    Test(
        "server-plain",
        "32 mixed requests, server (not streamed) against offline",
        "output tok/s",
        [workload.mixed],
        _rate,
        peer="octavo",
        subject="octavo-server-plain",
        target=0.95,
    ),
]

STARTS = Test("start", "process start to first token", "s", [], _seconds, lower_is_better=True)


def run_phases(subject: Subject, test: Test, prompts: int, phases: int) -> Timing:
    """Of the last so many phases, the last one's timing."""
    return [subject.run(make(prompts)) for make in test.phases[-phases:]][-1]


def prompts_of(test: Test, repetition: int) -> int:
    """The workload's repetition, such that no test sees another's prompts."""
    return 1000 * (TESTS.index(test) + 1) + repetition


def run_test(test: Test, subjects: dict[str, Subject], repetition: int) -> dict[str, float]:
    """One turn of both sides; who goes first alternates."""
    sides = [
        (test.subject, len(test.phases)),
        (test.peer, len(test.phases) if test.peer == "octavo" else test.peer_phases),
    ]
    found = {
        name: test.measure(run_phases(subjects[name], test, prompts_of(test, repetition), phases))
        for name, phases in (sides if repetition % 2 == 0 else reversed(sides))
    }
    return {**found, "ratio": found[test.subject] / found[test.peer]}


def server_start(model: Path) -> float:
    """Seconds from the start of ``octavo serve`` to its first token."""
    began = time.perf_counter()
    with server.start(model) as running:
        running.complete([100, 200, 300, 400], max_tokens=1)
        return time.perf_counter() - began


def peer_start(model: Path) -> float:
    """Seconds from the start of a process with transformers to its first token."""
    with Subject(command("transformers", model)) as subject:
        return subject.start_seconds


def measure_starts(model: Path, repetitions: int) -> dict[str, Any]:
    """Warm starts, in turns. The files are in the page cache by then."""
    turns = []
    for repetition in range(repetitions):
        ours, theirs = server_start(model), peer_start(model)
        turns.append({"octavo": ours, "transformers": theirs, "ratio": ours / theirs})
        console.print(f"{repetition + 1}/{repetitions} start: {ours:.2f} s, peer {theirs:.2f} s")
    return summary(STARTS, turns) | {"target_seconds": 5.0}


def summary(test: Test, turns: list[dict[str, float]]) -> dict[str, Any]:
    medians = {key: statistics.median(turn[key] for turn in turns) for key in turns[0]}
    ratio = medians["ratio"]
    met = ratio <= test.target if test.lower_is_better else ratio >= test.target
    return {
        "figure": test.figure,
        "unit": test.unit,
        "median": medians,
        "target_ratio": test.target or None,
        "met": met if test.target else None,
        "repetitions": turns,
    }


def show(results: dict[str, Any]) -> None:
    table = Table("figure", "octavo", "against", "ratio", "target")
    for test in (*TESTS, STARTS):
        if test.name not in results:
            continue
        entry = results[test.name]
        median = entry["median"]
        sign = "≤" if test.lower_is_better else "≥"
        target = f"{sign} {test.target}{'' if entry['met'] else ' MISSED'}" if test.target else ""
        table.add_row(
            f"{test.figure}, {test.unit}",
            f"{median[test.subject]:.3g}",
            f"{test.peer} {median[test.peer]:.3g}",
            f"{median['ratio']:.2f}",
            target,
        )
    console.print(table)


def measure(tests: list[Test], model: Path, repetitions: int) -> dict[str, list[dict[str, float]]]:
    """Turns of each test. All subjects stay loaded, idle while another one runs."""
    turns: dict[str, list[dict[str, float]]] = {test.name: [] for test in tests}
    with ExitStack() as stack:
        subjects = {}
        for name in sorted({name for test in tests for name in (test.subject, test.peer)}):
            console.print(f"starting {name}")
            subjects[name] = stack.enter_context(Subject(command(name, model)))
            subjects[name].run(workload.warm_up())
        for repetition in range(repetitions):
            for test in tests:
                turn = run_test(test, subjects, repetition)
                turns[test.name].append(turn)
                shown = ", ".join(f"{key} {value:.3g}" for key, value in turn.items())
                console.print(f"{repetition + 1}/{repetitions} {test.figure}: {shown}")
    return turns


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--only", nargs="*", choices=[test.name for test in (*TESTS, STARTS)])
    parser.add_argument("--save-as", default="cpu", help="name of the file in results/")
    options = parser.parse_args()
    wanted = options.only or [test.name for test in (*TESTS, STARTS)]
    chosen = [test for test in TESTS if test.name in wanted]
    model = models.path("G-bf16")
    turns = measure(chosen, model, options.repetitions) if chosen else {}
    summaries = {test.name: summary(test, turns[test.name]) for test in chosen}
    if STARTS.name in wanted:
        summaries[STARTS.name] = measure_starts(model, options.repetitions)
    show(summaries)
    console.print(f"saved {save(options.save_as, {'tests': summaries})}")


if __name__ == "__main__":
    main()
