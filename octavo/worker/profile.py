"""Traces of steps, and what their time went into."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from octavo.core.plan import StepPlan
from octavo.ops.native import calls
from octavo.types import ConfigError, StepProfile

# What a kernel's or an operator's name says about its kind; the first that matches counts.
_KINDS = (
    ("attention", r"attention|attn|flash|fmha|sdpa"),
    ("embedding", r"embed|index_select|take_rows|lookup"),
    ("linear", r"gemv|gemm|skinny|linear|cutlass|cublas|nvjet|xmma|splitk|addmm|::mm\b|matmul"),
    ("norm", r"norm"),
    ("sampler", r"argmax|sampl|gumbel|softmax|topk|top_k|sort|multinomial|exponential|penalt"),
    ("activation", r"silu|gelu"),
    ("rotary embedding", r"rope|rotary"),
    ("copies", r"memcpy|memset|copy|fill|cat\b|index_put|gather|scatter|indexing"),
)
_NATIVE = "octavo_"  # ranges that are CPU kernels of our own
_KERNELS = {"kernel", "gpu_memcpy", "gpu_memset"}


class StepProfiler:
    """Records what the thread that makes it does, and a GPU with it, from ``start`` to ``stop``."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._num_steps = 0
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        self._profile = profile(activities=activities)

    def start(self) -> None:
        """Raises ConfigError for a directory that cannot be written."""
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"{self._directory}: cannot be written ({error.strerror})") from error
        self._profile.start()
        calls.name_kernels(True)

    def step(self, plan: StepPlan) -> AbstractContextManager[Any]:
        """The range of one step in the trace."""
        self._num_steps += 1
        return record_function(describe(plan))

    def stop(self) -> StepProfile:
        """Writes the trace, for chrome://tracing or ui.perfetto.dev."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        calls.name_kernels(False)
        self._profile.stop()
        trace = _unused(self._directory)
        self._profile.export_chrome_trace(str(trace))
        return summarize(trace, self._num_steps)


def nvtx_step(plan: StepPlan) -> AbstractContextManager[Any]:
    """The range of one step for Nsight Systems: ``nsys profile -t cuda,nvtx octavo …``."""
    found: AbstractContextManager[Any] = torch.cuda.nvtx.range(describe(plan))
    return found


def check_nvtx() -> None:
    """Raises ConfigError where there is no NVTX."""
    if torch.version.cuda is None:
        raise ConfigError("--nvtx: this torch is built without CUDA, so there are no NVTX ranges")


def describe(plan: StepPlan) -> str:
    return f"step {plan.step}: {plan.num_rows} rows, {plan.total_tokens} tokens"


def summarize(trace: Path, num_steps: int) -> StepProfile:
    """``trace``: as torch.profiler writes it."""
    events = [e for e in json.loads(trace.read_text())["traceEvents"] if e.get("ph") == "X"]
    kernels = [e for e in events if e.get("cat") in _KERNELS]
    if kernels:
        timed = [(e["name"], e["ts"], e["dur"]) for e in kernels]
        own = [(name, duration) for name, _, duration in timed]
    else:
        computing = [e for e in events if e.get("cat") == "cpu_op" or e["name"].startswith(_NATIVE)]
        timed = [(e["name"], e["ts"], e["dur"]) for e in computing]
        own = list(_own_times(timed))
    sums: dict[str, tuple[int, float]] = defaultdict(lambda: (0, 0.0))
    for name, duration in own:
        count, seconds = sums[kind_of(name)]
        sums[kind_of(name)] = (count + 1, seconds + duration / 1e6)
    kinds = dict(sorted(sums.items(), key=lambda item: -item[1][1]))
    span, idle, longest = _gaps([(ts, ts + duration) for _, ts, duration in timed])
    return StepProfile(trace, num_steps, kinds, span / 1e6, idle / 1e6, longest / 1e6)


def kind_of(name: str) -> str:
    lowered = name.lower()
    return next((kind for kind, pattern in _KINDS if re.search(pattern, lowered)), "other")


def _own_times(events: list[tuple[str, float, float]]) -> Iterable[tuple[str, float]]:
    """Of nested events of one thread: the time of each that is in none inside it."""
    open_events: list[list[Any]] = []  # name, end, own time
    for name, begin, duration in sorted(events, key=lambda e: (e[1], -e[2])):
        while open_events and open_events[-1][1] <= begin:
            ended = open_events.pop()
            yield ended[0], ended[2]
        if open_events:
            open_events[-1][2] -= duration
        open_events.append([name, begin + duration, duration])
    for name, _, own in open_events:
        yield name, own


def _gaps(intervals: list[tuple[float, float]]) -> tuple[float, float, float]:
    """(span, time covered by none, longest such gap)."""
    if not intervals:
        return 0.0, 0.0, 0.0
    intervals.sort()
    begin, reached = intervals[0][0], intervals[0][0]
    idle = longest = 0.0
    for start, end in intervals:
        if start > reached:
            idle += start - reached
            longest = max(longest, start - reached)
        reached = max(reached, end)
    return reached - begin, idle, longest


def _unused(directory: Path) -> Path:
    numbers = [re.match(r"steps-(\d+)\.json", path.name) for path in directory.iterdir()]
    last = max((int(match[1]) for match in numbers if match), default=0)
    return directory / f"steps-{last + 1}.json"
