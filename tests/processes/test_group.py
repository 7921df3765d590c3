"""GroupExecutor: what it does when ranks do not call, end, fail, or fall silent. The ranks are
processes without a model (``fake_worker``)."""

from __future__ import annotations

import gc
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import zmq

from octavo.config import EngineConfig, ParallelConfig, SchedulerConfig
from octavo.grammar.grammars import Grammars
from octavo.types import ConfigError, EngineDead, SamplingParams, StepFailed
from octavo.worker import group, messages
from octavo.worker.group import GroupExecutor
from octavo.worker.info import WorkerInfo
from octavo.worker.messages import encoder
from octavo.worker.runner import _first_plan

FAKE = (sys.executable, str(Path(__file__).with_name("fake_worker.py")))
Make = Callable[..., GroupExecutor]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    made: list[GroupExecutor] = []

    def build(mode: str, deadline: float = 30.0, tp: int = 2, pp: int = 1) -> GroupExecutor:
        config = EngineConfig(
            scheduler=SchedulerConfig(step_deadline=deadline),
            parallel=ParallelConfig(tensor_parallel_size=tp, pipeline_parallel_size=pp),
        )
        found = GroupExecutor(config, Grammars(), tmp_path, (*FAKE, mode))
        made.append(found)
        return found

    yield build
    for found in made:
        found.shutdown(0.5)


def start(executor: GroupExecutor) -> WorkerInfo:
    return executor.start(lambda *news: None)


def plan_of(step: int):
    return replace(_first_plan(3, SamplingParams(), 16), step=step)


def pids(executor: GroupExecutor) -> list[int]:
    return [rank.process.pid for rank in executor._ranks if rank.process]


def test_all_ranks_get_the_steps_and_the_sums_of_bytes_are_told(make: Make) -> None:
    executor = make("well", tp=2, pp=2)
    info = start(executor)
    assert (info.device, info.kv_cache_bytes, info.weight_bytes) == ("4 x cpu", 4000, 2000)
    assert executor.num_stages == 2
    for step in range(3):
        executor.submit(plan_of(step))
    assert [executor.collect().step for _ in range(3)] == [0, 1, 2]
    assert executor.idle() and executor.num_pending == 3
    children = pids(executor)
    executor.shutdown()
    assert not any(map(runs, children))
    executor.shutdown()


def runs(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


@pytest.mark.parametrize(
    ("mode", "error", "message"),
    [
        ("silent", EngineDead, r"rank 1 \(pid \d+\): has not called within 2 s"),
        ("leaves", EngineDead, r"rank 1 \(pid \d+ on here\) ended with code 7"),
        ("refuses", ConfigError, "^no such thing$"),
        ("differs", ConfigError, "rank 1 on here .* dtype is 'float16', here 'auto'"),
    ],
)
def test_a_rank_that_cannot_start_is_named_and_none_is_left(
    mode: str, error: type[Exception], message: str, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    if mode == "silent":
        monkeypatch.setattr(group, "START_SECONDS", 2.0)
    executor = make(mode)
    with pytest.raises(error, match=message):
        start(executor)
    assert not any(map(runs, pids(executor)))


def test_a_step_that_fails_on_all_ranks_has_failed_and_others_follow(make: Make) -> None:
    executor = make("faults")
    start(executor)
    for step in range(3):
        executor.submit(plan_of(step))
    assert executor.collect().step == 0
    with pytest.raises(StepFailed, match="slipped"):
        executor.collect()
    assert executor.collect().step == 2


def test_what_a_rank_of_a_former_engine_says_does_not_count(make: Make) -> None:
    """Ranks on other hosts outlive their engine for a while, and call the next one."""
    executor = make("well")
    start(executor)
    former = executor._context.socket(zmq.DEALER)
    former.setsockopt(zmq.IDENTITY, b"1/former/news")
    former.connect(executor._endpoint)
    former.send(encoder.encode(messages.Broken("I cannot go on")))
    former.send(encoder.encode(messages.StepError(0, "I slipped")))
    for step in range(2):
        executor.submit(plan_of(step))
        assert executor.collect().step == step
    assert not executor._faults
    former.close(linger=0)


def test_a_step_that_fails_on_one_rank_ends_the_group(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group, "SAME_FAULT_SECONDS", 0.3)
    executor = make("fails")
    start(executor)
    executor.submit(plan_of(1))
    with pytest.raises(EngineDead, match=r"rank 1 .* failed alone in step 1: rank 1 slipped"):
        executor.collect()


def test_a_rank_that_is_silent_is_named_and_not_the_one_that_failed_for_it(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group, "SAME_FAULT_SECONDS", 2.0)
    executor = make("freezes")
    start(executor)
    executor.submit(plan_of(1))
    with pytest.raises(EngineDead, match=r"rank 1 .* has not answered .* step 1 failed on rank 0"):
        executor.collect()


def test_a_killed_rank_is_named_at_once(make: Make) -> None:
    executor = make("well")
    start(executor)
    os.kill(pids(executor)[1], signal.SIGKILL)
    with pytest.raises(EngineDead, match=r"rank 1 .* was ended by signal 9"):
        until(executor, lambda: False)


def until(executor: GroupExecutor, done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not done():
        assert time.monotonic() < deadline
        executor.idle()
        time.sleep(0.02)


def test_one_that_is_forgotten_leaves_no_process_and_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    config = EngineConfig(parallel=ParallelConfig(tensor_parallel_size=2))
    executor = GroupExecutor(config, Grammars(), None, (*FAKE, "well"))
    start(executor)
    assert not list(tmp_path.iterdir())
    children = pids(executor)
    executor.submit(plan_of(0))
    assert executor.collect().step == 0
    del executor
    gc.collect()
    assert not any(map(runs, children))


def test_ranks_outlive_the_thread_that_has_started_them(make: Make) -> None:
    executor = make("well")
    thread = threading.Thread(target=start, args=(executor,))
    thread.start()
    thread.join()
    assert executor.num_pending
    time.sleep(0.3)
    executor.submit(plan_of(0))
    assert executor.collect().step == 0
    executor.shutdown()
    assert "ranks" not in [thread.name for thread in threading.enumerate() if thread.is_alive()]


def test_a_stopped_rank_is_a_problem_until_it_goes_on(make: Make) -> None:
    executor = make("well")
    start(executor)
    executor.num_pending = 0  # nothing that the stopped rank would have to answer
    stopped = pids(executor)[1]
    os.kill(stopped, signal.SIGSTOP)
    until(executor, lambda: "rank 1" in executor.problem)
    os.kill(stopped, signal.SIGCONT)
    until(executor, lambda: not executor.problem)


def test_a_rank_that_stays_silent_ends_the_group(make: Make) -> None:
    executor = make("well", deadline=2.0)
    start(executor)
    executor.num_pending = 0
    os.kill(pids(executor)[0], signal.SIGSTOP)
    with pytest.raises(EngineDead, match=r"rank 0 .* has not answered for .* \(--step-deadline\)"):
        until(executor, lambda: False)


def test_the_rank_that_holds_a_step_up_is_named(make: Make) -> None:
    """Both beat; the one that has begun fewer exchanges is what the other waits for."""
    executor = make("fails", deadline=1.0)
    start(executor)
    executor._faults = NoFaults()
    executor.submit(plan_of(1))
    with pytest.raises(EngineDead, match=r"a step has taken .*; rank 0 .* begun 7 of 8 exchanges"):
        executor.collect()


class NoFaults(dict):
    """As if the rank that failed were still at it."""

    def setdefault(self, key: int, default: object = None) -> object:
        return default
