"""The executors: order, overlap, failures, start and end."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from octavo.core.plan import StepPlan, StepResult
from octavo.types import ConfigError, StepFailed
from octavo.worker import executor as executors
from octavo.worker.executor import CudaExecutor, UniExecutor
from octavo.worker.info import WorkerInfo
from octavo.worker.runner import Runner
from tests.fixtures.waiting import PATIENCE
from tests.worker.interpreted import config
from tests.worker.plans import New, Row, SumModel, plan


class Gated(SumModel):
    """Each forward waits until it is let through."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Semaphore(2)  # the two steps of the warm-up
        self.threads: set[int] = set()

    def forward(self, batch, cache, hidden=None):  # type: ignore[no-untyped-def]
        assert self.gate.acquire(timeout=PATIENCE)
        self.threads.add(torch.get_num_threads())
        return super().forward(batch, cache)


@pytest.fixture
def model() -> Gated:
    return Gated()


@pytest.fixture
def executor(model: Gated, monkeypatch: pytest.MonkeyPatch) -> Iterator[UniExecutor]:
    def start(config, path, progress, grammars) -> tuple[Runner, WorkerInfo]:  # type: ignore[no-untyped-def]
        runner = Runner(config, path, lambda path, config, progress: model)
        return runner, runner.start(progress)

    monkeypatch.setattr(executors, "start_runner", start)
    made = UniExecutor(config(threads=1), Path("none"))
    made.start(lambda *news: None)
    yield made
    for _ in range(10):
        model.gate.release()
    made.shutdown()


def test_submit_never_waits_and_results_come_in_order(executor: UniExecutor, model: Gated) -> None:
    rows = [
        Row(0, 0, 2, draw=True, blocks=[0, 1]),
        *(Row(0, 2 + i, 1, draw=True) for i in range(3)),
    ]
    for step, row in enumerate(rows):
        new = (New(0, [3, 4]),) if step == 0 else ()
        executor.submit(plan(row, new=new, step=step))
    for _ in rows:
        model.gate.release()
    assert [executor.collect().step for _ in rows] == [0, 1, 2, 3]


def test_the_thread_count_holds_on_the_thread_that_computes(
    executor: UniExecutor, model: Gated
) -> None:
    assert model.threads == {1}


def test_a_failed_step_is_raised_in_its_place_and_later_plans_go_on(
    executor: UniExecutor, model: Gated, caplog: pytest.LogCaptureFixture
) -> None:
    executor.submit(plan(Row(0, 0, 2, draw=True, blocks=[0]), new=(New(0, [3, 4]),), step=7))
    executor.submit(plan(Row(0, 9, 1, draw=True), step=8))  # token 9 of 3
    executor.submit(plan(Row(1, 0, 1, draw=True, blocks=[5]), new=(New(1, [6]),), step=9))
    for _ in range(2):
        model.gate.release()
    assert executor.collect().step == 7
    with pytest.raises(StepFailed, match="computes up to token 10 of slot 0") as failure:
        executor.collect()
    assert failure.value.step == 8
    assert "slots=[0] num_tokens=[1] starts=[9]" in caplog.text
    assert executor.collect().step == 9


def test_shutdown_ends_the_thread_after_the_plans_submitted(
    executor: UniExecutor, model: Gated
) -> None:
    executor.submit(plan(Row(0, 0, 1, draw=True, blocks=[0]), new=(New(0, [3]),), step=1))
    model.gate.release()
    executor.shutdown()
    assert executor.collect().step == 1
    executor.shutdown()
    assert not any(thread.name == "octavo-worker" for thread in threading.enumerate())


def test_what_cannot_start_raises_in_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(config, path, progress, grammars):  # type: ignore[no-untyped-def]
        raise ConfigError("none: no such model")

    monkeypatch.setattr(executors, "start_runner", start)
    with pytest.raises(ConfigError, match="no such model"):
        UniExecutor(config(), Path("none")).start(lambda *news: None)
    assert not any(thread.name == "octavo-worker" for thread in threading.enumerate())


class FakeGpu:
    """A CUDA runner whose steps end when they are waited for."""

    def __init__(self) -> None:
        self.finished: list[int] = []
        self.graphs = 2

    def launch(self, plan: StepPlan) -> SimpleNamespace:
        if plan.step == 8:
            raise ValueError("row 0 of step 8 is wrong")
        if plan.step == 9:
            raise torch.AcceleratorError("an illegal memory access was encountered")
        return SimpleNamespace(finish=lambda: self._finish(plan.step))

    def idle(self) -> bool:
        self.graphs -= 1
        return self.graphs >= 0

    def _finish(self, step: int) -> StepResult:
        self.finished.append(step)
        none = np.zeros(0, dtype=np.int32)
        return StepResult(step, none.reshape(0, 1), none, none)


def test_a_gpus_steps_are_launched_at_once_and_finished_when_collected() -> None:
    runner = FakeGpu()
    executor = CudaExecutor(runner)  # type: ignore[arg-type]
    for step in (1, 2):
        executor.submit(plan(Row(0, 0, 1), step=step))
    assert runner.finished == []
    assert not executor.idle()  # steps are in flight
    assert [executor.collect().step, executor.collect().step] == [1, 2]
    assert [executor.idle() for _ in range(3)] == [True, True, False]


def test_a_gpus_failed_launch_is_raised_in_its_place_and_later_plans_go_on() -> None:
    executor = CudaExecutor(FakeGpu())  # type: ignore[arg-type]
    for step in (7, 8, 10):
        executor.submit(plan(Row(0, 0, 1), step=step))
    assert executor.collect().step == 7
    with pytest.raises(StepFailed, match="row 0 of step 8 is wrong"):
        executor.collect()
    executor.shutdown()
    executor.shutdown()


def test_an_error_of_the_device_itself_ends_the_engine() -> None:
    executor = CudaExecutor(FakeGpu())  # type: ignore[arg-type]
    with pytest.raises(torch.AcceleratorError):
        executor.submit(plan(Row(0, 0, 1), step=9))


def test_what_a_gpu_still_computes_at_the_end_is_waited_for_failed_or_not() -> None:
    runner = FakeGpu()
    executor = CudaExecutor(runner)  # type: ignore[arg-type]
    for step in (7, 8, 10):
        executor.submit(plan(Row(0, 0, 1), step=step))
    executor.shutdown()
    assert runner.finished == [7, 10]


def test_a_gpus_memory_goes_when_its_executor_is_shut_down() -> None:
    executor = CudaExecutor(FakeGpu())  # type: ignore[arg-type]
    executor.submit(plan(Row(0, 0, 1), step=1))
    runner = weakref.ref(executor._runner)
    executor.shutdown()
    assert runner() is None and executor.num_pending == 0


def test_a_graph_that_cannot_be_captured_in_an_idle_moment_ends_nothing(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(error: Exception) -> CudaExecutor:
        def capture(self: FakeGpu) -> bool:
            raise error

        monkeypatch.setattr(FakeGpu, "idle", capture)
        return CudaExecutor(FakeGpu())  # type: ignore[arg-type]

    assert broken(torch.OutOfMemoryError("no memory")).idle()
    assert "could not be captured" in caplog.text and "no memory" in caplog.text
    with pytest.raises(torch.AcceleratorError):
        broken(torch.AcceleratorError("an illegal memory access was encountered")).idle()
