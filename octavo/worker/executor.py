"""Executors (``engine.engine.Executor``): take plans, give results back, in order. No torch until
``start``."""

from __future__ import annotations

import logging
import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from octavo.config import EngineConfig, prepare_torch
from octavo.core.plan import StepPlan, StepResult
from octavo.grammar.grammars import Grammars
from octavo.types import Progress, StepFailed, StepProfile
from octavo.worker.group import GroupExecutor
from octavo.worker.info import PhaseClock, WorkerInfo
from octavo.worker.topology import Topology
from octavo.worker.tracing import Tracing

if TYPE_CHECKING:
    from octavo.worker.cuda_runner import CudaRunner, Pending
    from octavo.worker.device import Device
    from octavo.worker.runner import Runner

logger = logging.getLogger(__name__)

T = TypeVar("T")


class UniExecutor:
    """A CPU worker, on a thread of this process: plan N + 1 is built while N computes."""

    num_pending = 0
    num_stages = 1
    problem = ""

    def __init__(self, config: EngineConfig, path: Path, grammars: Grammars | None = None) -> None:
        self._config = config
        self._path = path
        self._grammars = grammars
        self._plans: queue.SimpleQueue[StepPlan | Callable[[], None] | None] = queue.SimpleQueue()
        self._tracing = Tracing(config.nvtx)
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
        self._plans.put(plan)

    def ready(self) -> bool:
        """Whether ``collect`` would return at once."""
        return not self._results.empty()

    def idle(self) -> bool:
        return False

    def collect(self) -> StepResult:
        outcome = self._results.get()
        if isinstance(outcome, StepFailed):
            raise outcome
        return outcome

    def start_profile(self, directory: Path) -> None:
        self._call(lambda: self._tracing.start(directory))

    def stop_profile(self) -> StepProfile:
        return self._call(self._tracing.stop)

    def _call(self, task: Callable[[], T]) -> T:
        """On the worker's thread, after the plans submitted so far; waits for it."""
        answers: queue.SimpleQueue[tuple[T | None, BaseException | None]] = queue.SimpleQueue()

        def run() -> None:
            try:
                answers.put((task(), None))
            except Exception as error:
                answers.put((None, error))

        self._plans.put(run)
        answer, error = answers.get()
        if error is not None:
            raise error
        return answer  # type: ignore[return-value]

    def abandon(self) -> None:
        pass

    def shutdown(self) -> None:
        if self._thread is not None:
            self._plans.put(None)
            self._thread.join()
            self._thread = None

    def _work(self, progress: Progress) -> None:
        try:
            runner, info = start_runner(self._config, self._path, progress, self._grammars)
            self._tracing.prepare()
        except BaseException as error:
            self._started.put(error)
            return
        self._started.put(info)
        while (plan := self._plans.get()) is not None:
            if not isinstance(plan, StepPlan):
                plan()
                continue
            try:
                with self._tracing.range(plan):
                    result = runner.execute(plan)
                self._results.put(result)
            except Exception as error:
                self._results.put(failed(plan, error))


class CudaExecutor:
    """A GPU, driven by the thread that submits: the device queues steps itself, and what a thread
    of our own would add is a hand-over for every step.

    An error of the device itself cannot be survived: it is raised as it is, and ends the engine.
    """

    num_stages = 1
    busy_seconds = 0.0  # of a stage; a GPU has them all
    problem = ""

    def __init__(self, runner: CudaRunner, nvtx: bool = False, alone: bool = True) -> None:
        """``alone``: no other rank computes the same steps."""
        self._alone = alone
        self._runner: CudaRunner | None = runner
        self.tracing = Tracing(nvtx)
        self._results: deque[Pending | StepFailed] = deque()

    def start(self, progress: Progress) -> WorkerInfo:
        """Loads the model. Raises ConfigError when it cannot be used."""
        self.tracing.prepare()
        return self._open.start(progress)

    @property
    def _open(self) -> CudaRunner:
        assert self._runner is not None, "the executor was shut down"
        return self._runner

    def submit(self, plan: StepPlan) -> None:
        import torch

        try:
            with self.tracing.range(plan):
                self._results.append(self._open.launch(plan))
        except torch.AcceleratorError:
            raise
        except Exception as error:
            self._results.append(failed(plan, error))

    def take_drawn(self, results: Sequence[StepResult]) -> None:
        """Of a pipeline's last stage: a GPU has all stages."""
        assert not results

    def ready(self) -> bool:
        """Whether ``collect`` would return at once."""
        outcome = self._results[0] if self._results else None
        return outcome is None or isinstance(outcome, StepFailed) or outcome.mark.reached

    def collect(self) -> StepResult:
        outcome = self._results.popleft()
        if isinstance(outcome, StepFailed):
            raise outcome
        return outcome.finish()

    def start_profile(self, directory: Path) -> None:
        self.tracing.start(directory)

    def stop_profile(self) -> StepProfile:
        return self.tracing.stop()

    def idle(self) -> bool:
        import torch

        try:
            return not self._results and self._open.idle()
        except torch.AcceleratorError:
            raise
        except Exception:
            if not self._alone:  # the others have captured theirs, or wait in it
                raise
            logger.exception("a CUDA graph could not be captured; its steps do without")
            return True

    @property
    def num_pending(self) -> int:
        return self._runner.num_pending if self._runner is not None else 0

    def abandon(self) -> None:
        pass

    def shutdown(self) -> None:
        """And gives the GPU's memory back."""
        import torch

        while self._results:
            with suppress(StepFailed):
                self.collect()
        self._runner = None
        torch.cuda.empty_cache()


def failed(plan: StepPlan, error: Exception) -> StepFailed:
    """Logs a step's failure with its plan. To be called while ``error`` is handled."""
    logger.exception("step %d failed; its plan was %s", plan.step, columns(plan))
    failure = StepFailed(plan.step, f"{type(error).__name__}: {error}")
    failure.__cause__ = error
    return failure


def columns(plan: StepPlan) -> str:
    """The columns of a plan for a log; no ids, which are the users' texts."""
    shown = ("slots", "num_tokens", "starts", "flags", "block_starts", "block_indptr", "block_ids")
    return " ".join(f"{name}={getattr(plan, name).tolist()}" for name in shown)


def start_executor(
    config: EngineConfig,
    path: Path,
    progress: Progress,
    grammars: Grammars | None = None,
    directory: Path | None = None,
) -> tuple[UniExecutor | CudaExecutor | GroupExecutor, WorkerInfo]:
    """The executor of the device that is found, or of the processes of several, started.
    ``grammars``: those of the requests it will get. ``directory``: for sockets. Raises ConfigError
    when the model cannot be used."""
    if Topology.of(config).size > 1:
        group = GroupExecutor(config, grammars or Grammars(), directory)
        return group, group.start(progress)
    clock = PhaseClock(progress)
    clock.enter("import torch")
    prepare_torch()
    from octavo.worker.device import choose_device

    device = choose_device()
    executor = _executor_on(device, config, path, grammars)
    imported = clock.finish()
    info = executor.start(progress)
    phases = {**imported, **info.startup_seconds}  # in the order in which they happened
    reasons = {"device": device.reason, **info.reasons}
    return executor, replace(info, startup_seconds=phases, reasons=reasons)


def _executor_on(
    device: Device, config: EngineConfig, path: Path, grammars: Grammars | None
) -> UniExecutor | CudaExecutor:
    if device.kind == "cpu":
        return UniExecutor(config, path, grammars)
    from octavo.worker.cuda_runner import CudaRunner

    device.enter()
    return CudaExecutor(CudaRunner(config, path, device, grammars=grammars), config.nvtx)


def start_runner(
    config: EngineConfig, path: Path, progress: Progress, grammars: Grammars | None = None
) -> tuple[Runner, WorkerInfo]:
    """A started CPU runner; its thread must be the one that executes (torch's thread count is
    its)."""
    prepare_torch()
    from octavo.worker.runner import Runner

    runner = Runner(config, path, grammars=grammars)
    return runner, runner.start(progress)
