"""Comm: how the processes of an engine exchange tensors. The only user of torch.distributed."""

from __future__ import annotations

import logging
import mmap
import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from octavo.machine import available_cores
from octavo.ops.native import collectives
from octavo.types import EngineDead

logger = logging.getLogger(__name__)

# For the group to meet, and for one collective: an engine that hears nothing ends its workers much
# earlier (--step-deadline), so this only keeps processes that nobody watches from waiting for ever.
TIMEOUT = timedelta(minutes=10)


class Exchanges:
    """How many exchanges with other ranks this process has begun."""

    count = 0  # through torch.distributed
    shared: ClassVar[list[collectives.SharedGroup]] = []

    @classmethod
    def begun(cls) -> int:
        """From any thread."""
        return cls.count + sum(group.begun for group in cls.shared)


@contextmanager
def _exchange() -> Iterator[None]:
    """Around one of them. Raises EngineDead where another rank has gone: that rank's end is told by
    the executor, so here a line is enough."""
    Exchanges.count += 1
    try:
        yield
    except torch.AcceleratorError:
        raise
    except RuntimeError as error:
        raise _failed(_first_line(error)) from error


def _failed(why: str) -> EngineDead:
    return EngineDead(f"an exchange with other ranks failed: {why}")


def _first_line(error: RuntimeError) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


class Comm:
    """Some ranks and what they do together; each call is made by all of them, in the same order.
    On a GPU calls are enqueued on the current stream, and can be captured. ``transport``: by what
    they meet, for people; ``recordable``: whether a tape of CPU kernels can hold sums."""

    recordable = False

    def __init__(self, group: dist.ProcessGroup, ranks: Sequence[int], transport: str = "") -> None:
        self._group = group
        self.transport = transport or dist.get_backend(group)
        self.ranks = tuple(ranks)
        self.rank = self.ranks.index(dist.get_rank())
        self.size = len(self.ranks)

    def told(self, why: str) -> Comm:
        """The same, with the reason in ``transport`` why it is this one."""
        return Comm(self._group, self.ranks, f"{self.transport} ({why})")

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of all ranks' x, in x. The same bits on every rank."""
        with _exchange():
            dist.all_reduce(x, group=self._group)
        return x

    def all_gather(self, x: Tensor, sizes: Sequence[int]) -> Tensor:
        """x: [T, sizes[rank]]. [T, sum(sizes)], the ranks' columns side by side."""
        rows, widest = len(x), max(sizes)
        if x.shape[1] < widest:
            padded = x.new_zeros(rows, widest)
            padded[:, : x.shape[1]] = x
            x = padded
        parts = list(x.new_empty(self.size, rows, widest).unbind())
        with _exchange():
            dist.all_gather(parts, x.contiguous(), group=self._group)
        return torch.cat([part[:, :size] for part, size in zip(parts, sizes)], dim=1)

    def broadcast(self, x: Tensor, source: int = 0) -> Tensor:
        """What the rank ``source`` of these has in x, in x."""
        with _exchange():
            dist.broadcast(x, self.ranks[source], group=self._group)
        return x

    def smallest(self, numbers: Sequence[int]) -> list[int]:
        """The smallest of all ranks' numbers, place by place. Waits."""
        device = "cuda" if dist.get_backend(self._group) == "nccl" else "cpu"
        found = torch.tensor(list(numbers), dtype=torch.int64, device=device)
        with _exchange():
            dist.all_reduce(found, op=dist.ReduceOp.MIN, group=self._group)
        return [int(number) for number in found.tolist()]

    def send(self, x: Tensor, to: int) -> Callable[[], None]:
        """Begins to send x to the rank ``to`` of these, which calls ``receive``. x must stay as it
        is until the call returned has been made, which waits until it has gone."""
        with _exchange():
            work = dist.isend(x, self.ranks[to], group=self._group)
        assert work is not None

        def wait() -> None:
            work.wait()
            del x_kept[:]

        x_kept = [x]
        return wait

    def receive(self, x: Tensor, source: int) -> Tensor:
        """Fills x with what the rank ``source`` of these sends."""
        with _exchange():
            dist.recv(x, self.ranks[source], group=self._group)
        return x


class ThroughMemory:
    """Collectives of ranks that share memory."""

    recordable = True
    _shared: collectives.SharedGroup

    def all_reduce(self, x: Tensor) -> Tensor:
        self._shared.all_reduce(x)
        return x

    def all_gather(self, x: Tensor, sizes: Sequence[int]) -> Tensor:
        return self._shared.all_gather(x, sizes)

    def broadcast(self, x: Tensor, source: int = 0) -> Tensor:
        self._shared.broadcast(x, source)
        return x


class SharedComm(ThroughMemory, Comm):
    """Of ranks on one host. What one sends to another goes by gloo."""

    def __init__(self, comm: Comm, shared: collectives.SharedGroup) -> None:
        super().__init__(comm._group, comm.ranks, "shared memory")
        self._shared = shared
        Exchanges.shared.append(shared)

    def smallest(self, numbers: Sequence[int]) -> list[int]:
        own = torch.tensor([list(numbers)], dtype=torch.int64)
        found = self.all_gather(own, [len(numbers)] * self.size)
        return [int(number) for number in found.view(self.size, -1).amin(0)]


@dataclass(frozen=True)
class Place:
    """Which process of an engine this is. ``rank``: stage by stage, the ranks that share a layer
    next to each other; ``local``: its number among the ``num_local`` of its host."""

    rank: int
    tensor_size: int
    pipeline_size: int = 1
    local: int = 0
    num_local: int = 1

    @property
    def size(self) -> int:
        return self.tensor_size * self.pipeline_size

    @property
    def tensor_rank(self) -> int:
        return self.rank % self.tensor_size

    @property
    def stage(self) -> int:
        return self.rank // self.tensor_size


@dataclass(frozen=True)
class World:
    """All processes of an engine: ``tensor``: those that share this one's layers; ``pipeline``:
    those of equal tensor rank, one of each stage."""

    place: Place
    everyone: Comm
    tensor: Comm
    pipeline: Comm


def open_store(host: str) -> Any:
    """Where the processes of an engine find each other, at a free port of this host (``.port``).
    ``host``: the address the others reach it at, the only one that it listens to."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, 0), family=family)
    return dist.TCPStore(  # type: ignore[attr-defined]
        host,
        listener.getsockname()[1],
        None,
        is_master=True,
        timeout=TIMEOUT,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


def meet(place: Place, host: str, port: int, device: torch.device, store: Any = None) -> World:
    """Joins the others of ``place`` at the store that rank 0 has opened at ``host``:``port``, and
    gives as ``store``. Waits for all of them. ``device``: this rank's."""
    backend = "nccl" if device.type == "cuda" else "gloo"
    if store is None:
        store = dist.TCPStore(  # type: ignore[attr-defined]
            host, port, None, is_master=False, timeout=TIMEOUT, wait_for_workers=False
        )
    dist.init_process_group(
        backend,
        store=store,
        rank=place.rank,
        world_size=place.size,
        timeout=TIMEOUT,
        device_id=device if backend == "nccl" else None,
    )
    assert dist.group.WORLD is not None
    everyone = Comm(dist.group.WORLD, range(place.size))
    size = place.tensor_size
    stages = [range(first, first + size) for first in range(0, place.size, size)]
    numbers = [range(number, place.size, size) for number in range(size)]
    tensor = _own(everyone, stages)
    if backend == "gloo" and tensor.size > 1:
        tensor = _through_memory(tensor, place, store)
    if tensor.size == everyone.size:
        everyone = tensor
    return World(place, everyone, tensor, _own(everyone, numbers))


def _own(everyone: Comm, groups: Sequence[range]) -> Comm:
    """Of groups that all ranks make together, the one that this rank is in."""
    if len(groups) == 1:
        return everyone
    made = [dist.new_group(list(ranks), timeout=TIMEOUT) for ranks in groups]
    rank = dist.get_rank()
    return next(Comm(group, ranks) for group, ranks in zip(made, groups) if rank in ranks)


def _through_memory(comm: Comm, place: Place, store: Any) -> Comm:
    """The same ranks, through memory where all are on this host and can; as they were otherwise,
    with the reason in ``transport``."""
    if len({rank // place.num_local for rank in comm.ranks}) > 1:
        return comm.told("several hosts")
    memory, problem = _common_memory(comm, store)
    key = f"octavo/shares/{comm.ranks[0]}"
    store.set(f"{key}/{comm.rank}", f"{os.getpid()} {problem}")
    told = [store.get(f"{key}/{rank}").decode().partition(" ") for rank in range(comm.size)]
    for rank, (_, _, problem) in zip(comm.ranks, told):
        if problem:
            return comm.told(f"rank {rank}: {problem}")
    assert memory is not None
    shared = collectives.SharedGroup(
        memory,
        comm.rank,
        [int(pid) for pid, _, _ in told],
        TIMEOUT.total_seconds(),
        spins=place.num_local <= available_cores(),
        names=comm.ranks,
        failed=_failed,
    )
    return SharedComm(comm, shared)


def _common_memory(comm: Comm, store: Any) -> tuple[mmap.mmap | None, str]:
    """What all ranks map, or why this one cannot."""
    key, problem = f"octavo/memory/{comm.ranks[0]}", collectives.problem()
    try:
        if comm.rank == 0:
            store.set(key, _offered(comm.size, problem))
        if problem:
            return None, problem
        with open(store.get(key).decode(), "r+b") as opened:
            return mmap.mmap(opened.fileno(), collectives.memory_size(comm.size)), ""
    except OSError as error:
        return None, str(error)


def _offered(size: int, problem: str) -> str:
    """The path by which other ranks open the memory. It has no name: whatever ends the ranks,
    nothing of it is left."""
    if problem:
        return ""
    file = os.memfd_create("octavo-ranks")
    try:
        os.posix_fallocate(file, 0, collectives.memory_size(size))
    except OSError as error:
        os.close(file)
        logger.warning("no memory for ranks to share: %s", error)
        return ""
    return f"/proc/{os.getpid()}/fd/{file}"  # stays open, as mmap's own copy of it does


def part() -> None:
    """Leaves the group."""
    if dist.is_initialized():
        dist.destroy_process_group()


@dataclass(frozen=True)
class Link:
    """What an all-reduce of the ranks that share layers (where there are none: of all) was measured
    to take."""

    transport: str
    seconds_small: float  # of 8 KiB
    bytes_per_second: float  # of 16 MiB: bytes of the tensor by time


def measure(world: World, device: torch.device, budget: float = 1.0) -> Link:
    """Checks that sums are right, and times them, for at most about ``budget`` seconds. Raises
    RuntimeError for a wrong sum."""
    comm = world.tensor if world.tensor.size > 1 else world.everyone
    for group in (world.everyone, comm):
        check = torch.full((16,), float(group.rank + 1), device=device)
        wanted = group.size * (group.size + 1) / 2
        if not (group.all_reduce(check) == wanted).all():
            raise RuntimeError(
                f"an all-reduce of {group.size} ranks gave {check[0]:g}, not {wanted:g}"
            )
    small = _timed(comm, torch.zeros(2 << 10, device=device), budget / 4)
    large = torch.zeros(4 << 20, device=device)
    return Link(comm.transport, small, large.nbytes / _timed(comm, large, budget / 2))


def _timed(comm: Comm, x: Tensor, budget: float) -> float:
    """Seconds of one all-reduce, for about ``budget`` seconds: the ranks agree on how many are
    made."""

    def once(count: int) -> float:
        if x.is_cuda:
            torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(count):
            comm.all_reduce(x)
        if x.is_cuda:
            torch.cuda.synchronize()
        return (time.perf_counter() - began) / count

    once(1)
    (fitting,) = comm.smallest([max(1, min(50, int(budget / max(once(2), 1e-6))))])
    return once(fitting)
