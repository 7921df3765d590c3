"""The ranks of an engine as threads of one process: what they give each other goes through shared
lists, or the memory that processes of one host share, so that any shape is tried in milliseconds.
``tests.processes`` has real ones.
"""

from __future__ import annotations

import mmap
import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from octavo.config import EngineConfig
from octavo.core.plan import StepPlan, StepResult, decode, encode
from octavo.grammar.grammars import Grammars
from octavo.model.shard import TensorParallel
from octavo.ops.native import collectives
from octavo.parallel import Place, ThroughMemory, World
from octavo.types import Progress, StepProfile
from octavo.worker.info import WorkerInfo
from octavo.worker.runner import Runner
from octavo.worker.topology import Topology

T = TypeVar("T")


class Meeting:
    """Where the threads of a group hand over their tensors."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size)
        self.given: list[Tensor] = [torch.empty(0)] * size
        self.sent: dict[tuple[int, int], queue.SimpleQueue[Tensor]] = {
            (source, to): queue.SimpleQueue() for source in range(size) for to in range(size)
        }


class ThreadComm:
    """``parallel.Comm`` of threads."""

    recordable = False

    def __init__(self, meeting: Meeting, rank: int) -> None:
        self._meeting = meeting
        self.rank = rank
        self.size = len(meeting.given)

    def _all(self, x: Tensor) -> list[Tensor]:
        self._meeting.given[self.rank] = x.clone()
        self._meeting.barrier.wait()
        found = list(self._meeting.given)
        self._meeting.barrier.wait()
        return found

    def all_reduce(self, x: Tensor) -> Tensor:
        parts = self._all(x)
        total = parts[0].clone()
        for part in parts[1:]:
            total += part
        return x.copy_(total)

    def all_gather(self, x: Tensor, sizes: Sequence[int]) -> Tensor:
        assert x.shape[1] == sizes[self.rank]
        return torch.cat(self._all(x), dim=1)

    def broadcast(self, x: Tensor, source: int = 0) -> Tensor:
        return x.copy_(self._all(x)[source])

    def smallest(self, numbers: Sequence[int]) -> list[int]:
        columns = torch.stack(self._all(torch.tensor(list(numbers))))
        return [int(number) for number in columns.amin(0)]

    def send(self, x: Tensor, to: int) -> Callable[[], None]:
        self._meeting.sent[self.rank, to].put(x.clone())
        return lambda: None

    def receive(self, x: Tensor, source: int) -> Tensor:
        return x.copy_(self._meeting.sent[source, self.rank].get(timeout=60))


def shared_groups(size: int, timeout: float = 60.0) -> list[collectives.SharedGroup]:
    """Of ranks that are threads."""
    memory = mmap.mmap(-1, collectives.memory_size(size))
    return [
        collectives.SharedGroup(memory, rank, [0] * size, timeout, spins=False)
        for rank in range(size)
    ]


class MemoryComm(ThroughMemory, ThreadComm):
    """Of ranks that are threads."""

    def __init__(self, meeting: Meeting, rank: int, shared: collectives.SharedGroup) -> None:
        super().__init__(meeting, rank)
        self._shared = shared


def worlds(tensor_size: int, pipeline_size: int = 1, through_memory: bool = False) -> list[World]:
    """Of each rank. ``through_memory``: those that share layers."""
    size = tensor_size * pipeline_size
    shared = [
        shared_groups(tensor_size) if through_memory and tensor_size > 1 else []
        for _ in range(pipeline_size)
    ]
    everyone = Meeting(size)
    of_stages = [Meeting(tensor_size) for _ in range(pipeline_size)]
    of_numbers = [Meeting(pipeline_size) for _ in range(tensor_size)]
    found = []
    for rank in range(size):
        place = Place(rank, tensor_size, pipeline_size, rank, size)
        comms: list[Any] = [
            ThreadComm(everyone, rank),
            MemoryComm(
                of_stages[place.stage], place.tensor_rank, shared[place.stage][place.tensor_rank]
            )
            if shared[place.stage]
            else ThreadComm(of_stages[place.stage], place.tensor_rank),
            ThreadComm(of_numbers[place.tensor_rank], place.stage),
        ]
        found.append(World(place, *comms))
    return found


def on_ranks(size: int, work: Callable[[TensorParallel], T]) -> list[T]:
    """What ``work`` gives on each of ``size`` ranks that share layers; raises what the first one
    raised."""
    found: list[Any] = [None] * size
    errors: list[BaseException] = []
    together = worlds(size)

    def run(world: World) -> None:
        try:
            found[world.place.rank] = work(TensorParallel.of(world.tensor))
        except threading.BrokenBarrierError:
            pass
        except BaseException as error:
            errors.append(error)
            for other in together:
                other.tensor._meeting.barrier.abort()  # type: ignore[attr-defined]

    threads = [threading.Thread(target=run, args=(world,)) for world in together]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return found


class ThreadGroup:
    """``worker.group.GroupExecutor`` of threads."""

    num_pending = 0
    problem = ""

    def __init__(self, config: EngineConfig, path: Path, grammars: Grammars | None) -> None:
        topology = Topology.of(config)
        self.num_stages = topology.pipeline_size
        through_memory = not collectives.problem()
        together = worlds(topology.tensor_size, topology.pipeline_size, through_memory)
        self._reporter = topology.reporter
        self._plans: list[queue.SimpleQueue[Any]] = [queue.SimpleQueue() for _ in together]
        self._results: list[queue.SimpleQueue[Any]] = [queue.SimpleQueue() for _ in together]
        self._drawn: list[bytes] = []
        self._runners = [
            Runner(
                config,
                path,
                grammars=grammars if world.place.rank == self._reporter else None,
                world=world,
            )
            for world in together
        ]

    def start(self, progress: Progress) -> WorkerInfo:
        for rank in range(len(self._runners)):
            threading.Thread(target=self._work, args=(rank,), daemon=True).start()
        infos = [self._next(rank) for rank in range(len(self._runners))]
        assert len({info.num_blocks for info in infos}) == 1
        total = sum(info.kv_cache_bytes for info in infos)
        return replace(infos[0], kv_cache_bytes=total)

    def _work(self, rank: int) -> None:
        runner, results = self._runners[rank], self._results[rank]
        try:
            results.put(runner.start(lambda *news: None))
            while (given := self._plans[rank].get()) is not None:
                plan, drawn = given
                runner.take_drawn([decode(raw, StepResult) for raw in drawn])
                results.put(runner.execute(decode(plan, StepPlan)))
        except BaseException as error:
            results.put(error)

    def _next(self, rank: int) -> Any:
        outcome = self._results[rank].get(timeout=120)
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    def submit(self, plan: StepPlan) -> None:
        for plans in self._plans:
            plans.put((encode(plan), self._drawn))
        self._drawn = []

    def collect(self) -> StepResult:
        results = [self._next(rank) for rank in range(len(self._runners))]
        for result in results[self._reporter :]:  # all of the last stage have drawn the same
            assert np.array_equal(result.tokens, results[self._reporter].tokens)
        if self.num_stages > 1:
            self._drawn.append(encode(results[self._reporter]))
        found: StepResult = results[self._reporter]
        return found

    def ready(self) -> bool:
        return not self._results[self._reporter].empty()

    def idle(self) -> bool:
        return False

    def start_profile(self, directory: Path) -> None:
        raise NotImplementedError

    def stop_profile(self) -> StepProfile:
        raise NotImplementedError

    def abandon(self) -> None:
        pass

    def shutdown(self) -> None:
        for plans in self._plans:
            plans.put(None)
