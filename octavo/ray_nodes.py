"""Replicas as actors of a Ray cluster (--data-parallel-backend ray): a process beside the server.

    python -m octavo.ray_nodes PARENT_PID   < JSON Task
    python -m octavo.ray_nodes child PARENT_PID TOKEN …

The first form connects to the cluster and keeps as many actors alive as there are to be replicas,
spread over its nodes; each runs ``octavo serve --headless`` (the second form) as a child. When a
node leaves, Ray is asked for another actor. Lines on stdout tell the server: JSON, see ``Told``.
Ray is imported here and nowhere else in a server; nothing of ours is imported by the cluster but
this module.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from collections import deque
from typing import Any

import msgspec

from octavo.config import SECRET_VARIABLE, environment_with
from octavo.parent import die_with_parent

POLL_SECONDS = 1.0
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 30.0  # before an actor that has ended is replaced
WAIT_SECONDS = 15.0  # until it is said that the cluster has no room
KEPT_LINES = 5  # of what a node has printed last, for the log of the head


class Task(msgspec.Struct):
    """What is to run. ``num_gpus`` and ``num_cpus``: of one replica, which Ray counts; GPUs where
    the cluster has any. ``host``: the head's address, "" for the one that Ray knows it by."""

    count: int
    num_gpus: int
    num_cpus: int
    tokens: list[str]  # of the command line: octavo TOKENS
    host: str
    secret: str


class Told(msgspec.Struct):
    """A line for the server. ``error``: nothing can run, and why; else news for its log."""

    news: str = ""
    error: str = ""


def tell(told: Told) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(told) + b"\n")
    sys.stdout.buffer.flush()


class Node:
    """The actor: one replica's processes on one node of the cluster."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def where(self) -> str:
        """The node's id and host."""
        import ray

        return f"{ray.get_runtime_context().get_node_id()[:12]} ({socket.gethostname()})"

    def run(self, tokens: list[str], secret: str) -> tuple[int, str]:
        """Until it ends: its exit code, and the last lines it has printed."""
        command = [sys.executable, "-m", "octavo.ray_nodes", "child", str(os.getpid()), *tokens]
        self._process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True, errors="replace", env=environment_with({SECRET_VARIABLE: secret}),
            start_new_session=True,
        )  # fmt: skip
        last: deque[str] = deque(maxlen=KEPT_LINES)
        assert self._process.stdout is not None
        for line in self._process.stdout:
            last.append(line.strip())
            print(line, end="", flush=True)  # Ray keeps it, and shows it where the server logs
        return self._process.wait(), " | ".join(filter(None, last))


class Keeper:
    """Keeps the actors. ``ray``: the module."""

    def __init__(self, ray: Any, task: Task) -> None:
        self._ray, self._task = ray, task
        self._use_gpus = ray.cluster_resources().get("GPU", 0) > 0
        self._actors: dict[int, Any] = {}
        self._runs: dict[Any, int] = {}  # a run's reference -> its number
        self._began: dict[int, float] = {}
        self._due = dict.fromkeys(range(task.count), 0.0)  # number -> when to start it
        self._pauses = dict.fromkeys(range(task.count), FIRST_PAUSE)
        self._places: dict[Any, int] = {}  # of those that do not run yet
        self._complained: set[int] = set()

    def keep(self) -> None:
        """For ever."""
        while True:
            now = time.monotonic()
            for number in [n for n, due in self._due.items() if due <= now]:
                del self._due[number]
                self._start(number, now)
            if self._runs:
                pending = [*self._places, *self._runs]
                done, _ = self._ray.wait(pending, num_returns=1, timeout=POLL_SECONDS)
                for reference in done:
                    if reference in self._places:
                        self._place(reference)
                    else:
                        self._replace(reference)
            else:
                time.sleep(POLL_SECONDS)
            self._look_at_waiting()

    def end(self) -> None:
        for actor in self._actors.values():
            with contextlib.suppress(Exception):  # the node may be gone
                self._ray.kill(actor)

    def _start(self, number: int, now: float) -> None:
        task = self._task
        resources = {"num_gpus": task.num_gpus} if self._use_gpus else {"num_cpus": task.num_cpus}
        remote = self._ray.remote(**resources, scheduling_strategy="SPREAD", max_restarts=0)
        self._actors[number] = actor = remote(Node).remote()
        self._places[actor.where.remote()] = number
        self._runs[actor.run.remote(task.tokens, task.secret)] = number
        self._began[number] = now
        self._complained.discard(number)

    def _replace(self, run: Any) -> None:
        number = self._runs.pop(run)
        try:
            code, last = self._ray.get(run)
            why = f"ended with exit code {code}: {last}"
        except self._ray.exceptions.RayError as error:
            why = " ".join(str(error).split())[:300]
        with contextlib.suppress(Exception):
            self._ray.kill(self._actors.pop(number))
        if time.monotonic() - self._began[number] > LONGEST_PAUSE:
            self._pauses[number] = FIRST_PAUSE
        pause = self._pauses[number]
        self._pauses[number] = min(2 * pause, LONGEST_PAUSE)
        self._due[number] = time.monotonic() + pause
        tell(Told(f"Ray actor {number}: {why}; asking for another one in {pause:g} s"))

    def _place(self, where: Any) -> None:
        """An actor runs, or has ended before it could say where."""
        number = self._places.pop(where)
        with contextlib.suppress(self._ray.exceptions.RayError):  # its run tells why
            tell(Told(f"Ray actor {number} runs on node {self._ray.get(where)}"))

    def _look_at_waiting(self) -> None:
        """Says, once of each, which actors the cluster has no room for."""
        now = time.monotonic()
        for number in self._places.values():
            if number in self._complained or now - self._began[number] < WAIT_SECONDS:
                continue
            self._complained.add(number)
            task = self._task
            need = f"{task.num_gpus} GPUs" if self._use_gpus else f"{task.num_cpus} CPUs"
            free = self._ray.available_resources().get("GPU" if self._use_gpus else "CPU", 0)
            tell(Told(f"Ray actor {number} waits for a node with {need} free (all have {free:g})"))


def run(task: Task) -> int:
    try:
        import ray
    except ImportError as error:
        tell(Told(error=f"Ray cannot be imported ({error}): pip install 'octavo[ray]'"))
        return 2
    try:
        ray.init(address="auto", logging_level="WARNING", log_to_driver=True)
    except ConnectionError as error:
        why = " ".join(str(error).split())[:200]
        tell(
            Told(
                error=f"no Ray cluster ({why}): start one with `ray start --head` here and `ray "
                "start --address=HEAD:6379` on the other nodes, or set RAY_ADDRESS"
            )
        )
        return 2
    host = task.host or ray.util.get_node_ip_address()
    task.tokens += ["--data-parallel-address", host]
    nodes = [node for node in ray.nodes() if node["Alive"]]
    tell(Told(f"a Ray cluster of {len(nodes)} nodes; replicas join at {host}"))
    keeper = Keeper(ray, task)
    try:
        keeper.keep()
    except KeyboardInterrupt:  # the server has ended
        pass
    finally:
        keeper.end()
        ray.shutdown()
    return 0


def main() -> int:
    if sys.argv[1] == "child":
        die_with_parent(int(sys.argv[2]))
        from octavo.cli.main import main as octavo

        return octavo(sys.argv[3:])
    die_with_parent(int(sys.argv[1]))
    return run(msgspec.convert(json.load(sys.stdin), Task))


if __name__ == "__main__":
    from octavo import ray_nodes  # so that the cluster imports ``Node``, too

    sys.exit(ray_nodes.main())
