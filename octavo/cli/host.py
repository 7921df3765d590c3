"""What this machine offers a server, and what of it will be in the way."""

from __future__ import annotations

import os
import resource
import shutil
import socket
from dataclasses import dataclass
from pathlib import Path

from octavo.cli.collect_env import collect
from octavo.cli.console import size
from octavo.config import model_cache_dir
from octavo.machine import available_cores, available_memory

LEAST_FILES = 4096  # open files: two for each connection, and some
LEAST_SHARED = 256 << 20  # bytes of /dev/shm, where ranks of one model exchange tensors
LEAST_DISK = 20 << 30  # bytes where models are kept
PORTS = (8000,)


@dataclass(frozen=True)
class Fact:
    """``trouble``: what is wrong with it and what to do; "" for nothing."""

    name: str
    value: str
    trouble: str = ""


def facts() -> list[Fact]:
    found = collect()
    return [
        Fact("octavo", found["octavo"]),
        Fact("python", found["python"]),
        _torch(found["torch"], found["gpus"]),
        Fact("GPUs", found["gpus"]),
        _cpu(found),
        _cores(),
        _memory(),
        _disk(model_cache_dir()),
        _shared_memory(),
        _files(),
        *(_port(port) for port in PORTS),
    ]


def _torch(version: str, gpus: str) -> Fact:
    has_gpu = not gpus.startswith("none")
    if has_gpu and version.endswith("+cpu"):
        return Fact("torch", version, "a build for CPUs, on a machine with GPUs: install the "
                    "default build (make install TORCH_INDEX=)")  # fmt: skip
    return Fact("torch", version, "" if version != "not installed" else "pip install torch")


def _cpu(found: dict[str, str]) -> Fact:
    built = found["cpu kernels"] == "built"
    return Fact(
        "CPU", f"{found['cpu']}, octavo's kernels {found['cpu kernels']}",
        "" if built else "no C++ compiler was found at installation: install g++ and octavo again, "
        "or the CPU is served by torch alone",
    )  # fmt: skip


def _cores() -> Fact:
    usable, there = available_cores(), os.cpu_count() or 1
    why = "" if usable == there else " (affinity or the cgroup's quota)"
    trouble = "" if usable > 1 else "server and engine share one core: give it two or more"
    return Fact("cores", f"{usable} of {there} usable{why}", trouble)


def _memory() -> Fact:
    free = available_memory()
    trouble = "" if free > 2 << 30 else "less than 2 GiB: weights and KV cache will not fit"
    return Fact("memory", f"{size(free)} free", trouble)


def _disk(directory: Path) -> Fact:
    there = next(path for path in (directory, *directory.parents) if path.exists())
    free = shutil.disk_usage(there).free
    trouble = "" if free > LEAST_DISK else "little room for models: HF_HOME, OCTAVO_CACHE name " \
        "where they are kept"  # fmt: skip
    return Fact("disk", f"{size(free)} free at {there}", trouble)


def _shared_memory() -> Fact:
    try:
        total = shutil.disk_usage("/dev/shm").total
    except OSError:
        return Fact("/dev/shm", "missing", "ranks of one model cannot exchange tensors there")
    small = total < LEAST_SHARED
    trouble = "small for several ranks: docker run --shm-size 1g" if small else ""
    return Fact("/dev/shm", size(total), trouble)


def _files() -> Fact:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    small = soft != resource.RLIM_INFINITY and soft < LEAST_FILES
    trouble = f"some {soft // 2} clients at once: ulimit -n {LEAST_FILES}" if small else ""
    return Fact("open files", f"{soft} (at most {hard})", trouble)


def _port(port: int) -> Fact:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            hint = "another server has it: octavo serve --port 0 takes any free one"
            return Fact(f"port {port}", str(error.strerror), hint)
    return Fact(f"port {port}", "free")
