"""What surrounds every step of a worker: a range of a trace, an NVTX range, or nothing. No torch
until one of them is wanted."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo.core.plan import StepPlan
from octavo.types import ConfigError, StepProfile

if TYPE_CHECKING:
    from octavo.worker.profile import StepProfiler


class Tracing:
    """``range(plan)`` is entered around each step. Used by the thread that computes."""

    def __init__(self, nvtx: bool) -> None:
        self._nvtx = nvtx
        self._profiler: StepProfiler | None = None
        self.range: Callable[[StepPlan], AbstractContextManager[Any]] = nullcontext

    def prepare(self) -> None:
        """Once torch may be imported. Raises ConfigError where there is no NVTX to be had."""
        if self._nvtx:
            from octavo.worker.profile import check_nvtx, nvtx_step

            check_nvtx()
            self.range = nvtx_step

    def start(self, directory: Path) -> None:
        """Raises ConfigError for a directory that cannot be written, and inside a trace."""
        from octavo.worker.profile import StepProfiler

        if self._profiler is not None:
            raise ConfigError("steps are being traced already: stop that first")
        profiler = StepProfiler(directory)
        profiler.start()
        self._profiler, self.range = profiler, profiler.step

    def stop(self) -> StepProfile:
        """Writes the trace. Raises ConfigError without one."""
        if self._profiler is None:
            raise ConfigError("no steps are being traced: start that first")
        profiler, self._profiler = self._profiler, None
        self.range = nullcontext
        self.prepare()
        return profiler.stop()
