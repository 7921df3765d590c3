"""Starts the ranks of a host, for the executor (``worker.group``) or for a machine that lends its
devices (``worker.node``). Never imports torch."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace

import msgspec

from octavo.config import EngineConfig, ParallelConfig, worker_environment
from octavo.machine import available_cores, interface_to
from octavo.worker.topology import Topology

WORKER_COMMAND = (sys.executable, "-m", "octavo.worker.process")


def node_endpoint(parallel: ParallelConfig) -> str:
    """Where machine 0 waits for the others' ranks."""
    host = parallel.master_addr
    return f"tcp://{f'[{host}]' if ':' in host else host}:{parallel.master_port}"


def launch_ranks(
    config: EngineConfig, node: int, endpoint: str, command: Sequence[str] = WORKER_COMMAND
) -> dict[int, subprocess.Popen[bytes]]:
    """Starts the ranks of a node; they call at ``endpoint``."""
    topology = Topology.of(config)
    threads = config.parallel.cpu_threads or max(1, available_cores() // topology.per_node)
    parallel = replace(config.parallel, cpu_threads=threads)
    given = msgspec.msgpack.encode(replace(config, parallel=parallel))
    environment = worker_environment(threads, interface_to(topology.address))
    found = {}
    for local, rank in enumerate(topology.ranks_of(node)):
        numbers = (rank, local, os.getpid())
        found[rank] = process = subprocess.Popen(
            [*command, endpoint, *map(str, numbers)], stdin=subprocess.PIPE, env=environment
        )
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it died at once, as its exit code tells
            process.stdin.write(given)
            process.stdin.close()
    return found


def keep(
    start: Callable[[], dict[int, subprocess.Popen[bytes]]],
    started: Future[dict[int, subprocess.Popen[bytes]]],
    ended: threading.Event,
) -> None:
    """What the thread does that starts processes and stays until they have ended."""
    try:
        started.set_result(start())
    except BaseException as error:
        started.set_exception(error)
    else:
        ended.wait()


def how_ended(code: int) -> str:
    """code: of a process that has ended."""
    return f"was ended by signal {-code}" if code < 0 else f"ended with code {code}"
