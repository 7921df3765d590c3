"""Runs the tests in two parts and tells their sum: ``make test``.

    python scripts/run_tests.py [--workers N] [flags of pytest]

First those that compute in one thread, by several workers (pytest-xdist), then, alone, those that
start servers, fill the machine or watch how long others wait. Where a flag names a file or a
directory, that runs alone. The status is 0 if nothing failed and something ran.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as xml
from collections import Counter
from pathlib import Path

TESTS = Path(__file__).parents[1] / "tests"
ALONE = ("benchmarks", "cases", "cli", "engine", "guide", "processes", "server")
FIRST = "ops"  # the longest goes first, or it would be left for one worker
MARKERS = "not gpu and not conformance and not net and not long"
MOST_WORKERS = 8  # each takes about 1.5 GB
NOTHING_RAN = 5  # a status of pytest


def phases(flags: list[str], workers: int) -> list[tuple[str, list[str]]]:
    """Name and arguments of each run of pytest."""
    named = [flag.partition("::")[0] for flag in flags if flag.startswith("tests/")]
    if any((TESTS.parent / name).exists() for name in named):
        return [("alone", [])]
    paths = [path for path in TESTS.iterdir() if path.match("test_*.py") or _holds_tests(path)]
    paths.sort(key=lambda path: (path.name != FIRST, path.name))
    together = [str(path) for path in paths if path.name not in ALONE]
    order = ["--dist", "loadfile", "--no-loadscope-reorder"]
    spread = ["-n", str(workers), *order] if workers > 1 else []
    return [
        (f"{workers} at once", [*spread, *together]),
        ("alone", [str(path) for path in paths if path.name in ALONE]),
    ]


def _holds_tests(path: Path) -> bool:
    return path.is_dir() and any(path.rglob("test_*.py"))


def counts(report: Path) -> Counter[str]:
    """Of pytest's JUnit file; empty where it wrote none."""
    found: Counter[str] = Counter()
    if not report.exists():
        return found
    for suite in xml.parse(report).getroot().iter("testsuite"):
        for name in ("tests", "failures", "errors", "skipped"):
            found[name] += int(suite.get(name, 0))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    cores = len(os.sched_getaffinity(0))
    parser.add_argument("--workers", type=int, default=min(cores, MOST_WORKERS))
    options, flags = parser.parse_known_args()
    total: Counter[str] = Counter()
    statuses, lines, begin = [], [], time.monotonic()
    with tempfile.TemporaryDirectory() as directory:
        for name, arguments in phases(flags, options.workers):
            began, report = time.monotonic(), Path(directory) / f"{len(statuses)}.xml"
            command = [sys.executable, "-m", "pytest", "-m", MARKERS, f"--junitxml={report}"]
            statuses.append(subprocess.run([*command, *arguments, *flags]).returncode)
            part = counts(report)
            total += part
            seconds = time.monotonic() - began
            lines.append(f"==> {name}: {part['tests']} tests in {seconds:.0f} s")
    print(*lines, sep="\n")
    failed = total["failures"] + total["errors"]
    print(
        f"==> {total['tests']} tests: {total['tests'] - failed - total['skipped']} passed, "
        f"{total['skipped']} skipped, {failed} failed, in {time.monotonic() - begin:.0f} s"
    )
    bad = [status for status in statuses if status not in (0, NOTHING_RAN)]
    return max(bad) if bad else 0 if total["tests"] else NOTHING_RAN


if __name__ == "__main__":
    sys.exit(main())
