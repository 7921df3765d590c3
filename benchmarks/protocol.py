"""How a benchmark and the processes that it measures speak: a line of JSON in, a line of JSON out.

Each subject runs in a process of its own, loaded once and asked in turns, so that a drift of the
host hits all alike. Imports only what every subject's environment has.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

from benchmarks.cpu_workload import Work

ROOT = Path(__file__).parents[1]


class Refused(Exception):
    """The subject cannot run what it is asked to; the message says why."""


@dataclass(frozen=True)
class Timing:
    """One workload's run. Seconds; ``first_tokens`` per request, from the start of the run.
    ``outputs``: the token ids of each request, from subjects that tell them."""

    seconds: float
    first_tokens: list[float]
    num_output_tokens: int
    outputs: list[list[int]] = field(default_factory=list)

    @property
    def output_rate(self) -> float:
        return self.num_output_tokens / self.seconds

    @property
    def decode_rate(self) -> float:
        """Tokens per second after the first one (of a single request)."""
        return (self.num_output_tokens - 1) / (self.seconds - self.first_tokens[0])


Runner = Callable[[list[Work]], Timing]


def serve(make: Callable[[], Runner]) -> None:
    """The subject's side: runs what stdin asks for with ``make()``'s runner, whose attribute
    ``close``, if it has one, is called at the end. What libraries print goes to stderr."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(value: object) -> None:
        print(json.dumps(value), file=answers, flush=True)

    try:
        run = make()
    except Refused as error:
        answer({"refused": str(error)})
        return
    try:
        for line in sys.stdin:
            answer(asdict(run([Work(**item) for item in json.loads(line)])))
    finally:
        getattr(run, "close", lambda: None)()


class Subject:
    """A subject's process, whose ``command`` ends in ``serve``. ``start_seconds``: from its start
    to its first token. Raises Refused if it says so, RuntimeError if it ends instead."""

    def __init__(self, command: list[str]) -> None:
        self.command = command
        began = time.perf_counter()
        self._process = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.run([Work([100, 200, 300, 400], 1)])
        self.start_seconds = time.perf_counter() - began

    def run(self, work: list[Work]) -> Timing:
        assert self._process.stdin is not None and self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended: there will be no answer
            print(json.dumps([asdict(item) for item in work]), file=self._process.stdin, flush=True)
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the subject ended with {self._process.wait()}; see its output")
        answer = json.loads(line)
        if "refused" in answer:
            self.close()
            raise Refused(answer["refused"])
        return Timing(**answer)

    def processes(self) -> list[int]:
        """Process ids of the subject and all it started."""
        found = [self._process.pid]
        for pid in found:  # grows while it is walked
            for task in Path(f"/proc/{pid}/task").glob("*/children"):
                found += map(int, task.read_text().split())
        return found

    def peak_memory(self) -> float:
        """MiB: the sum over its processes of each one's peak resident set (VmHWM). A page that
        several share counts in each."""
        return sum(_peak_kib(pid) for pid in self.processes()) / 1024

    def cpu_seconds(self) -> float:
        """CPU time that its processes have spent so far."""
        return sum(_cpu_ticks(pid) for pid in self.processes()) / os.sysconf("SC_CLK_TCK")

    def close(self) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            raise

    def __enter__(self) -> Subject:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _peak_kib(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next((int(line.split()[1]) for line in lines if line.startswith("VmHWM")), 0)


def _cpu_ticks(pid: int) -> int:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])  # utime and stime
