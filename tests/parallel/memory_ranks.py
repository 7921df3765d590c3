"""Ranks that are processes and meet in memory, for test_shared_collectives.py.

    OMP_NUM_THREADS=1 python -m tests.parallel.memory_ranks

Forks 2, 3 and 4 of them, which compare their sums with those of all parts; then two more, of which
one is killed while the other waits. Raises where something is not as it should be.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import signal
import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor

from octavo.ops.native import collectives
from octavo.ops.native.collectives import CAPACITY, SharedGroup

LARGEST = 1 << 20  # 4 MiB of FP32
# One number, less than a cache line, both sides of where sums are made in parts, several buffers.
_FEW = (1, 15, 1000, 8192, 16385, CAPACITY // 8 + 77)
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int32, torch.int64)
COUNTS = dict.fromkeys(DTYPES, _FEW)
COUNTS[torch.float32] = COUNTS[torch.bfloat16] = (*_FEW, LARGEST)


def numbers(dtype: torch.dtype, count: int, rank: int) -> Tensor:
    """What this rank gives."""
    random = torch.Generator().manual_seed(count * 7 + rank)
    if dtype.is_floating_point:
        return torch.randn(count, generator=random).to(dtype)
    return torch.randint(-(1 << 20), 1 << 20, (count,), generator=random, dtype=dtype)


def exact_sum(parts: list[Tensor]) -> Tensor:
    return torch.stack([part.double() for part in parts]).sum(0)


def tolerance(parts: list[Tensor]) -> Tensor:
    """Half a step of the dtype, and the steps of FP32 on the way. FP64 [count]."""
    dtype = parts[0].dtype
    if not dtype.is_floating_point:
        return torch.zeros(len(parts[0]), dtype=torch.float64)
    on_the_way = min(torch.finfo(dtype).eps, torch.finfo(torch.float32).eps)
    sizes = torch.stack([part.double().abs() for part in parts]).sum(0)
    smallest = torch.finfo(dtype).smallest_normal
    steps = torch.finfo(dtype).eps / 2 * exact_sum(parts).abs() + len(parts) * on_the_way * sizes
    return steps + smallest


def digests(group: SharedGroup, rank: int, size: int) -> list[str]:
    """Of all sums, each compared with that of the parts."""
    found = []
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        for count in COUNTS[dtype]:
            x = numbers(dtype, count, rank)
            group.all_reduce(x)
            parts = [numbers(dtype, count, other) for other in range(size)]
            assert ((x.double() - exact_sum(parts)).abs() <= tolerance(parts)).all(), (dtype, count)
            found.append(hashlib.sha256(x.view(torch.uint8).numpy()).hexdigest())
    told = torch.full((3, 5), rank)
    group.broadcast(told, size - 1)
    assert (told == size - 1).all()
    joined = group.all_gather(torch.full((3, 1 + rank), rank), [*range(1, size + 1)])
    assert joined[2].tolist() == [rank for rank in range(size) for _ in range(rank + 1)]
    return found


def forked(size: int, work: Callable[[SharedGroup, int], None]) -> list[int]:
    """The ids of ``size`` processes, which do ``work`` as ranks of one group."""
    memory = mmap.mmap(-1, collectives.memory_size(size))
    started = []
    ready, go = os.pipe()
    for rank in range(size):
        if (pid := os.fork()) == 0:
            try:
                os.close(go)
                ids = [int(word) for word in os.read(ready, 1000).split()]
                work(SharedGroup(memory, rank, ids, 30.0, spins=size <= 2), rank)
                os._exit(0)
            except BaseException as error:
                print(f"rank {rank}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
                os._exit(1)
        started.append(pid)
    told = " ".join(map(str, started)).ljust(1000).encode()
    os.write(go, told * size)
    os.close(go)
    os.close(ready)
    return started


def compare(size: int) -> None:
    found = mmap.mmap(-1, size * 4096)

    def work(group: SharedGroup, rank: int) -> None:
        text = "".join(one[:16] for one in digests(group, rank, size)).encode()
        found[rank * 4096 : rank * 4096 + len(text)] = text

    codes = [os.waitpid(pid, 0)[1] for pid in forked(size, work)]
    assert codes == [0] * size, codes
    texts = {found[rank * 4096 : (rank + 1) * 4096] for rank in range(size)}
    assert len(texts) == 1, f"{size} ranks have {len(texts)} results"
    print(f"{size} ranks agree")


def lose_one() -> None:
    def work(group: SharedGroup, rank: int) -> None:
        x = torch.ones(100)
        group.all_reduce(x)
        if rank == 1:
            time.sleep(60)
        try:
            group.all_reduce(x)
        except RuntimeError as error:
            assert "rank 1" in str(error) and "has ended" in str(error), error
            print("rank 1 was killed: rank 0 was told", flush=True)
        else:
            raise AssertionError("a sum without rank 1")

    waiting, lost = forked(2, work)
    time.sleep(0.3)
    os.kill(lost, signal.SIGKILL)
    assert os.waitpid(waiting, 0)[1] == 0
    os.waitpid(lost, 0)


def main() -> None:
    torch.set_num_threads(1)
    for size in (2, 3, 4):
        compare(size)
    sys.stdout.flush()
    lose_one()


if __name__ == "__main__":
    main()
