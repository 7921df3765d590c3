"""Octavo on one GPU against vLLM 0.26.0's figures there, offline, greedy, random BF16 weights.

    python -m benchmarks.gpu [--quick] [--deterministic] [--model llama-8b] [--only bs1 mixed512]

One process per model shape (with --deterministic a second one, that prints what the flag costs);
best and median of three repetitions with fresh prompts. The bars were
measured on one NVIDIA H200 and say nothing elsewhere. ``--model tiny`` runs a small shape on any
machine, to test this program. Writes benchmarks/results/gpu.json (a part of the table:
gpu_partial.json).
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.gpu.workload import BARS, GPU_SHAPES, ROWS, SHAPES, START, Bar, Row
from benchmarks.report import ROOT, gpus, save

console = Console(width=None if sys.stdout.isatty() else 140)
REPETITIONS = 3


def subject(shape: str, repetitions: int, rows: list[str], *flags: str) -> Iterator[dict[str, Any]]:
    """What a subject's process tells, as it comes."""
    command = [sys.executable, "-m", "benchmarks.gpu.subject", shape, *flags, "--rows", *rows]
    command += ["--repetitions", str(repetitions)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        assert process.stdout is not None
        for line in process.stdout:
            yield json.loads(line)
    if process.returncode:
        raise SystemExit(f"{shape}: the engine's process ended with {process.returncode}")


def figures(row: Row, told: dict[str, Any], bar: Bar | None) -> dict[str, Any]:
    """The row's figure of the best and of the median repetition, beside the bar."""
    tokens = told["output_tokens"] if row.rate else None
    values = [tokens / s if tokens else s for s in told["seconds"]]
    best = max(values) if row.rate else min(values)
    entry = {"title": row.title, "unit": "output tok/s" if row.rate else "s"}
    entry |= {"best": best, "median": statistics.median(values), **told}
    return entry | compared(best, bar, row.rate)


def compared(best: float, bar: Bar | None, rate: bool) -> dict[str, Any]:
    """``speedup``: over vLLM, above 1 where octavo is faster."""
    if bar is None:
        return {}
    found = {"vllm": bar.vllm, "speedup": best / bar.vllm if rate else bar.vllm / best}
    if bar.least is not None:
        met = best >= bar.least if rate else best <= bar.least
        found |= {"least": bar.least, "aim": bar.aim, "met": met}
    return found


def measure(shape: str, rows: list[str], repetitions: int, starts: int) -> dict[str, Any]:
    """All asked-for rows of one shape. Its own start is the first, later ones find compiled kernels
    cached: ``starts`` of those are measured."""
    bars = BARS.get(shape, {})
    found: dict[str, Any] = {"rows": {}}
    if rows:
        told = subject(shape, repetitions, rows)
        found |= next(told)
        console.print(f"{shape}: ready after {found['ready_seconds']:.1f} s, {found['device']}")
        by_name = {row.name: row for row in ROWS}
        for facts in told:
            row = by_name[facts.pop("row")]
            entry = figures(row, facts, bars.get(row.name))
            found["rows"][row.name] = entry
            seconds = ", ".join(f"{s:.4g}" for s in facts["seconds"])
            console.print(f"{shape} {row.title}: {seconds} s")
    if starts:
        turns = [next(iter(list(subject(shape, 0, [])))) for _ in range(starts)]
        seconds = [turn["ready_seconds"] for turn in turns]
        found["rows"][START] = {
            "title": "process start -> ready",
            "unit": "s",
            "best": min(seconds),
            "median": statistics.median(seconds),
            "seconds": seconds,
            "phases": min(turns, key=lambda turn: turn["ready_seconds"])["phases"],
            **compared(min(seconds), bars.get(START), rate=False),
        }
    return found


def add_price(shape: str, rows: dict[str, dict[str, Any]]) -> None:
    """Adds to the rows what they take with --deterministic: one repetition each."""
    told = subject(shape, 1, [name for name in rows if name != START], "--deterministic")
    next(told)
    for facts in told:
        entry, seconds = rows[facts["row"]], facts["seconds"][0]
        entry["deterministic_seconds"] = seconds
        entry["price"] = seconds / min(entry["seconds"])
        console.print(f"{shape} {entry['title']}, deterministic: {seconds:.4g} s")


def show(results: dict[str, dict[str, Any]]) -> None:
    columns = ("best", "median", "vLLM 0.26", "speed-up", "at least", "aim", "deterministic")
    table = Table("shape", "workload", *columns)
    for shape, found in results.items():
        for entry in found["rows"].values():
            cells = [f"{entry['best']:.4g} {entry['unit']}", f"{entry['median']:.4g}"]
            if "vllm" in entry:
                cells += [f"{entry['vllm']:g}", f"{entry['speedup']:.2f}"]
            if "least" in entry:
                missed = "" if entry["met"] else " MISSED"
                cells += [f"{entry['least']:g}{missed}", f"{entry['aim']:g}"]
            if "price" in entry:
                cells += [""] * (6 - len(cells)) + [f"x {entry['price']:.2f}"]
            table.add_row(shape, entry["title"], *cells)
    console.print(table)


def main() -> None:
    names = [*(row.name for row in ROWS), START]
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", nargs="*", choices=list(SHAPES), default=list(GPU_SHAPES))
    parser.add_argument("--only", nargs="*", choices=names, default=names, metavar="ROW")
    parser.add_argument("--quick", action="store_true", help="one repetition")
    parser.add_argument(
        "--deterministic", action="store_true", help="also the price of that flag, for each row"
    )
    parser.add_argument("--save-as", help="name of the file in results/")
    options = parser.parse_args()
    whole = options.model == list(GPU_SHAPES) and options.only == names and not options.quick
    repetitions = 1 if options.quick else REPETITIONS
    began = time.monotonic()
    results = {}
    for shape in options.model:
        rows = [name for name in options.only if name != START]
        starts = repetitions if START in options.only else 0
        results[shape] = measure(shape, rows, repetitions, starts)
        if options.deterministic:
            add_price(shape, results[shape]["rows"])
    show(results)
    seconds = time.monotonic() - began
    content = {"gpus": gpus(), "seconds": round(seconds, 1), "models": results}
    file = save(options.save_as or ("gpu" if whole else "gpu_partial"), content)
    console.print(f"{seconds:.0f} s; saved {file}")


if __name__ == "__main__":
    main()
