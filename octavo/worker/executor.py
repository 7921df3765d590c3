"""Executors: take plans from the engine, give results back, in order. No torch until ``start``."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from octavo.config import EngineConfig, limit_spinning
from octavo.core.plan import StepPlan, StepResult
from octavo.types import StepFailed
from octavo.worker.info import PhaseClock, WorkerInfo

if TYPE_CHECKING:
    from octavo.worker.runner import Runner

logger = logging.getLogger(__name__)

Progress = Callable[[str, float], None]


class UniExecutor:
    """One worker, on a thread of this process: plan N + 1 is built while N computes.

    Implements engine.engine.Executor: plans run strictly in the order they were submitted.
    """

    def __init__(self, config: EngineConfig, path: Path) -> None:
        self._config = config
        self._path = path
        self._plans: queue.SimpleQueue[StepPlan | None] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[StepResult | StepFailed] = queue.SimpleQueue()
        self._started: queue.SimpleQueue[WorkerInfo | BaseException] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def start(self, progress: Progress) -> WorkerInfo:
        """Loads the model. Raises ConfigError when it cannot be used; nothing runs then."""
        self._thread = threading.Thread(
            target=self._work, args=(progress,), name="octavo-worker", daemon=True
        )
        self._thread.start()
        outcome = self._started.get()
        if isinstance(outcome, BaseException):
            self.shutdown()
            raise outcome
        return outcome

    def submit(self, plan: StepPlan) -> None:
        """Queues a plan; never blocks."""
        self._plans.put(plan)

    def ready(self) -> bool:
        """Whether ``collect`` would return at once."""
        return not self._results.empty()

    def collect(self) -> StepResult:
        """The oldest result not yet collected, waiting for it. Raises StepFailed for its step."""
        outcome = self._results.get()
        if isinstance(outcome, StepFailed):
            raise outcome
        return outcome

    def shutdown(self) -> None:
        """Ends after the plans already submitted. Idempotent."""
        if self._thread is not None:
            self._plans.put(None)
            self._thread.join()
            self._thread = None

    def _work(self, progress: Progress) -> None:
        try:
            runner, info = start_runner(self._config, self._path, progress)
        except BaseException as error:
            self._started.put(error)
            return
        self._started.put(info)
        while (plan := self._plans.get()) is not None:
            try:
                self._results.put(runner.execute(plan))
            except Exception as error:
                logger.exception("step %d failed; its plan was %s", plan.step, columns(plan))
                failure = StepFailed(plan.step, f"{type(error).__name__}: {error}")
                failure.__cause__ = error
                self._results.put(failure)


def columns(plan: StepPlan) -> str:
    """The columns of a plan for a log; no ids, which are the users' texts."""
    shown = ("slots", "num_tokens", "starts", "flags", "block_starts", "block_indptr", "block_ids")
    return " ".join(f"{name}={getattr(plan, name).tolist()}" for name in shown)


def start_runner(config: EngineConfig, path: Path, progress: Progress) -> tuple[Runner, WorkerInfo]:
    """A started runner of the device found; its thread must be the one that executes (torch's
    thread count and current GPU are its)."""
    clock = PhaseClock(progress)
    clock.enter("import torch")
    limit_spinning()
    from octavo.worker.device import choose_device
    from octavo.worker.runner import Runner

    imported = clock.finish()
    device = choose_device()
    if device.kind == "cuda":
        from octavo.worker.cuda_runner import CudaRunner

        device.enter()
        runner: Runner = CudaRunner(config, path, device)
    else:
        runner = Runner(config, path)
    info = runner.start(progress)
    phases = {**imported, **info.startup_seconds}  # in the order in which they happened
    reasons = {"device": device.reason, **info.reasons}
    return runner, replace(info, startup_seconds=phases, reasons=reasons)
