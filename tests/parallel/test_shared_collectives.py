"""What ranks of one host exchange through memory: sums that are the same bits on every rank, and
what is told of a rank that has gone. Ranks are threads here, and processes in ``memory_ranks``."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

from octavo import parallel
from octavo.ops.native import calls, collectives
from octavo.ops.native.collectives import CAPACITY, SharedGroup
from octavo.parallel import Place
from octavo.types import EngineDead
from tests.parallel.memory_ranks import COUNTS, DTYPES, exact_sum, numbers, tolerance
from tests.parallel.ranks import shared_groups

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(bool(collectives.problem()), reason="no kernels here"),
]


def on_threads(groups: list[SharedGroup], work: Callable[[SharedGroup, int], Any]) -> list[Any]:
    with ThreadPoolExecutor(len(groups)) as pool:
        return [*pool.map(work, groups, range(len(groups)))]


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sums_are_right_and_the_same_bits_on_every_rank(dtype: torch.dtype, size: int) -> None:
    def work(group: SharedGroup, rank: int) -> list[Tensor]:
        found = []
        for count in COUNTS[dtype]:
            found.append(numbers(dtype, count, rank))
            group.all_reduce(found[-1])
        return found

    first, *others = on_threads(shared_groups(size), work)
    for count, found, *same in zip(COUNTS[dtype], first, *others):
        parts = [numbers(dtype, count, rank) for rank in range(size)]
        assert all(torch.equal(found, other) for other in same)
        assert ((found.double() - exact_sum(parts)).abs() <= tolerance(parts)).all()


def test_processes_give_the_bits_of_threads() -> None:
    """Ranks that another process has forked, 2, 3 and 4 of them; of the last two one is killed."""
    command = [sys.executable, "-m", "tests.parallel.memory_ranks"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    told = subprocess.run(command, capture_output=True, text=True, timeout=100, env=environment)
    assert told.returncode == 0, told.stderr
    assert told.stdout.splitlines()[-1] == "rank 1 was killed: rank 0 was told"


def test_every_order_of_exchanges_keeps_its_buffers_apart() -> None:
    """Ranks that are early and late in turns, with tensors of one buffer, several and none."""
    sizes = [5, 0, 3]

    def work(group: SharedGroup, rank: int) -> None:
        for turn in range(60):
            if turn % 7 == rank:
                time.sleep(0.002)
            x = torch.full((turn % 5 * 9001,), float(rank + turn))
            group.all_reduce(x)
            assert (x == 3 * turn + 3).all()
            columns = torch.full((turn % 4, sizes[rank]), rank + turn)
            joined = group.all_gather(columns, sizes)
            assert (joined == torch.tensor([0] * 5 + [2] * 3) + turn).all()
            told = torch.full((1 + turn % 3, 7), rank + turn, dtype=torch.int16)
            group.broadcast(told, turn % 3)
            assert (told == turn % 3 + turn).all()

    on_threads(shared_groups(3), work)


def test_rows_longer_than_a_buffer_are_gathered_and_told() -> None:
    sizes = [CAPACITY // 8 + 13, CAPACITY // 4]

    def work(group: SharedGroup, rank: int) -> None:
        rows = [
            torch.arange(5 * size).view(5, size) * (rank + 1) for rank, size in enumerate(sizes)
        ]
        assert torch.equal(group.all_gather(rows[rank], sizes), torch.cat(rows, dim=1))
        told = rows[rank].clone() if rank else torch.zeros_like(rows[1])
        group.broadcast(told, 1)
        assert torch.equal(told, rows[1])

    on_threads(shared_groups(2), work)


def test_a_team_of_threads_shares_the_work_of_a_rank() -> None:
    def work(group: SharedGroup, rank: int) -> None:
        torch.set_num_threads(3)
        for count in (5, 5000, 300_001):
            x = numbers(torch.bfloat16, count, rank)
            group.all_reduce(x)
            parts = [numbers(torch.bfloat16, count, rank) for rank in range(2)]
            assert ((x.double() - exact_sum(parts)).abs() <= tolerance(parts)).all()
            rows = torch.full((count, 3), rank)
            assert (group.all_gather(rows, [3, 3])[:, 2:4] == torch.tensor([0, 1])).all()
            group.broadcast(rows, 1)
            assert (rows == 1).all()

    on_threads(shared_groups(2), work)


def test_a_tape_sums_as_many_rows_as_it_is_told_and_says_who_is_missing() -> None:
    def work(group: SharedGroup, rank: int) -> list[float]:
        x = torch.ones(8, 3) * (rank + 1)
        tape = calls.Tape((8,), calls.Pool())
        with tape.recording():
            group.all_reduce(x)
            group.all_reduce(x)
        tape.run(2)
        if rank == 1:
            with pytest.raises(RuntimeError, match=r"rank 0 .* within 0\.3 s"):
                tape.run(8)
        found: list[float] = x[:, 0].tolist()
        return found

    first, _ = on_threads(shared_groups(2, timeout=0.3), work)
    assert first == [6.0] * 2 + [1.0] * 6


def test_a_rank_that_does_not_come_is_named_and_ends_the_group() -> None:
    groups = shared_groups(3, timeout=0.2)
    on_threads(groups[:1] + groups[2:], lambda group, _: expect_late(group))
    began = time.monotonic()
    with pytest.raises(RuntimeError, match="rank 1"):
        groups[0].all_reduce(torch.zeros(3))
    assert time.monotonic() - began < 0.1


def expect_late(group: SharedGroup) -> None:
    with pytest.raises(RuntimeError, match=r"rank 1 \(pid 0\) has not come within 0.2 s"):
        group.all_reduce(torch.zeros(3))


def test_a_rank_that_sleeps_is_woken_by_the_one_it_waits_for() -> None:
    def work(group: SharedGroup, rank: int) -> None:
        x = torch.ones(4)
        for _ in range(20):
            time.sleep(0.01 * rank)
            group.all_reduce(x)
        assert (x == 1 << 20).all()

    began = time.monotonic()
    on_threads(shared_groups(2), work)
    assert time.monotonic() - began < 1.0  # by itself it looks every 0.1 s


def test_a_rank_whose_process_ends_is_named_at_once() -> None:
    peer = subprocess.Popen(["sleep", "60"])
    memory = mmap.mmap(-1, collectives.memory_size(2))
    group = SharedGroup(memory, 0, [os.getpid(), peer.pid], 60.0, names=[4, 5], failed=EngineDead)
    threading.Timer(0.1, peer.kill).start()
    began = time.monotonic()
    with pytest.raises(EngineDead, match=rf"rank 5 \(pid {peer.pid}\) has ended"):
        group.broadcast(torch.zeros(2), 1)
    assert time.monotonic() - began < 5
    peer.wait()


def test_what_cannot_be_summed_is_refused() -> None:
    group = shared_groups(2)[0]
    with pytest.raises(TypeError, match=r"contiguous tensor of torch\.int8"):
        group.all_reduce(torch.zeros(3, dtype=torch.int8))
    with pytest.raises(TypeError, match="strided"):
        group.all_reduce(torch.zeros(3, 4).t())


class FakeStore:
    """A store of threads."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._changed = threading.Condition()

    def set(self, key: str, value: str) -> None:
        with self._changed:
            self._values[key] = value.encode()
            self._changed.notify_all()

    def get(self, key: str) -> bytes:
        with self._changed:
            assert self._changed.wait_for(lambda: key in self._values, timeout=20)
            return self._values[key]


class FakeComm:
    """What ``Comm`` says of itself."""

    _group = None
    transport = "gloo"

    def __init__(self, rank: int, ranks: range) -> None:
        self.rank, self.ranks, self.size = rank, tuple(ranks), len(ranks)

    def told(self, why: str) -> str:
        return f"gloo ({why})"


def met(num_local: int = 4, ranks: range = range(2, 4)) -> list[Any]:
    """What each of two ranks gets, the first of them problems[0]'s."""
    store = FakeStore()

    def one(rank: int) -> Any:
        comm: Any = FakeComm(rank, ranks)
        return parallel._through_memory(comm, Place(ranks[rank], 2, 2, 0, num_local), store)

    with ThreadPoolExecutor(2) as pool:
        return [*pool.map(one, range(2))]


def test_ranks_of_one_host_meet_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel.dist, "get_rank", lambda: 2)
    monkeypatch.setattr(parallel.Exchanges, "shared", [])
    comms = met()
    assert [comm.transport for comm in comms] == ["shared memory"] * 2
    with ThreadPoolExecutor(2) as pool:
        sums = [*pool.map(lambda comm: comm.all_reduce(torch.ones(3)).tolist(), comms)]
        least = [*pool.map(lambda comm: comm.smallest([5, comm._shared._shared.rank]), comms)]
    assert sums == [[2.0] * 3] * 2
    assert least == [[5, 0]] * 2
    assert parallel.Exchanges.begun() == parallel.Exchanges.count + 4


@pytest.mark.parametrize(
    ("without", "num_local", "told"),
    [
        (0, 4, "gloo (rank 2: no kernels)"),
        (1, 4, "gloo (rank 3: no kernels)"),
        (None, 3, "gloo (several hosts)"),
    ],
)
def test_ranks_that_cannot_share_memory_say_why(
    without: int | None, num_local: int, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of them, also where one alone cannot."""
    plain = parallel._common_memory

    def refused(comm: Any, store: Any) -> Any:
        monkeypatch.setattr(collectives, "problem", lambda: "no kernels" if lacks() else "")
        here.rank = comm.rank
        return plain(comm, store)

    def lacks() -> bool:
        rank: int | None = here.rank
        return rank == without

    here = threading.local()
    monkeypatch.setattr(parallel, "_common_memory", refused)
    assert met(num_local) == [told] * 2
