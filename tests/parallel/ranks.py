"""The ranks of a tensor-parallel model as threads of one process: what they give each other goes
through shared lists, so that any shape is tried in milliseconds. ``test_comm`` has the real ones.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from octavo.model.shard import Shard, TensorParallel

T = TypeVar("T")


class Meeting:
    """Where the threads of a group hand over their tensors."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size)
        self.given: list[Tensor] = [torch.empty(0)] * size


class ThreadComm:
    """``parallel.Comm`` of threads."""

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


def on_ranks(size: int, work: Callable[[TensorParallel], T]) -> list[T]:
    """What ``work`` gives on each of ``size`` ranks; raises what the first one raised."""
    meeting = Meeting(size)
    found: list[Any] = [None] * size
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        comm: Any = ThreadComm(meeting, rank)
        try:
            found[rank] = work(TensorParallel(Shard(rank, size), comm))
        except threading.BrokenBarrierError:
            pass
        except BaseException as error:
            errors.append(error)
            meeting.barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return found
