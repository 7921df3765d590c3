"""Servers whose ranks are real processes that meet in memory or by gloo: what they answer, and what
happens when one of them, their engine or their server is stopped or killed."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.fixtures import models
from tests.fixtures.server import Server, launch, start

FLAGS = ("--dtype", "float32", "--max-model-len", "512", "--num-gpu-blocks-override", "64")
PROMPT = [5, 17, 200, 33, 9, 41]
WITHIN = 20.0  # seconds; what should take two may take longer on a machine that is busy


def processes_of(server: Server) -> list[int]:
    """The engine, then its workers in order of ranks."""
    (engine,) = (pid for pid in server.children() if "octavo.engine.process" in command(pid))
    tasks = Path(f"/proc/{engine}/task").glob("*/children")
    workers = [int(pid) for task in tasks for pid in task.read_text().split()]
    ranks = {int(command(pid)[4]): pid for pid in workers}
    return [engine, *(ranks[rank] for rank in sorted(ranks))]


def command(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/cmdline").read_text().split("\0")


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def until(condition: Callable[[], Any], what: str) -> float:
    """Seconds it took."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < WITHIN, f"not within {WITHIN} s: {what}"
        time.sleep(0.02)
    return time.monotonic() - began


def healthy(server: Server) -> bool:
    return server.client.get("/health").status_code == 200


class Streaming(threading.Thread):
    """A long answer being read."""

    def __init__(self, server: Server, num_tokens: int = 480) -> None:
        super().__init__(daemon=True)
        self._num_tokens = num_tokens
        self._url = f"{server.url}/v1/completions"
        self.events: list[dict[str, Any]] = []
        self.start()
        until(lambda: len(self.events) > 2, "the stream has begun")

    def run(self) -> None:
        body = {
            "prompt": PROMPT,
            "max_tokens": self._num_tokens,
            "ignore_eos": True,
            "stream": True,
        }
        with httpx.stream("POST", self._url, json=body, timeout=120) as response:
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    self.events.append(json.loads(line.removeprefix("data: ")))

    def error(self) -> str:
        """With which it ended."""
        self.join(WITHIN)
        assert not self.is_alive()
        message: str = self.events[-1]["error"]["message"]
        return message


def answers(server: Server) -> list[Any]:
    """Greedy; seeded with log-probabilities; under a grammar: alone and together."""
    greedy = server.complete(PROMPT, max_tokens=24, ignore_eos=True)
    drawn = server.complete(
        PROMPT, max_tokens=12, temperature=1, seed=7, logprobs=2, ignore_eos=True
    )
    choice = {"structured_outputs": {"choice": ["yes", "no"]}}
    chosen = server.complete(PROMPT, max_tokens=8, temperature=1, seed=3, **choice)
    several = server.complete(PROMPT, max_tokens=12, temperature=1, seed=5, n=3, ignore_eos=True)
    ids = [choice["token_ids"] for found in (greedy, drawn, several) for choice in found["choices"]]
    return [*ids, chosen["choices"][0]["text"]]


@pytest.fixture(scope="module")
def expected() -> list[Any]:
    with start(models.path("R-bf16"), *FLAGS) as server:
        found = answers(server)
    assert found[-1] in ("yes", "no")
    return found


def test_two_ranks_answer_as_one_and_their_faults_are_told(expected: list[Any]) -> None:
    with start(models.path("R-bf16"), *FLAGS, "-tp", "2", clean=False) as server:
        assert answers(server) == expected
        assert re.search(r"rank 1 on .*, cpu, shared memory: all-reduce of 8 KiB", server.log)
        engine, *workers = processes_of(server)
        assert len(workers) == 2
        stream = Streaming(server)
        os.kill(workers[1], signal.SIGSTOP)
        until(lambda: not healthy(server), "503 once a rank has stopped")
        assert "rank 1" in stream.error()
        os.kill(workers[1], signal.SIGCONT)
        until(lambda: healthy(server), "200 once it goes on")
        assert answers(server) == expected
        stream = Streaming(server)
        os.kill(workers[0], signal.SIGKILL)
        assert re.search(r"rank 0 .* was ended by signal 9", stream.error())
        assert server.client.get("/health").status_code == 503
        until(lambda: all(map(gone, (engine, *workers))), "no process is left")
        assert server.process.wait(WITHIN) == 1


def test_two_stages_answer_as_one_and_a_step_has_a_deadline(expected: list[Any]) -> None:
    with start(
        models.path("R-bf16"), *FLAGS, "-pp", "2", "--step-deadline", "3", clean=False
    ) as server:
        assert answers(server) == expected
        engine, *workers = processes_of(server)
        stream = Streaming(server)
        os.kill(workers[1], signal.SIGSTOP)
        assert "rank 1" in stream.error()
        until(lambda: gone(engine) and gone(workers[0]), "the engine ends its ranks")
        assert server.process.wait(WITHIN) == 1
        until(lambda: gone(workers[1]), "also the one that had stopped")
        assert "rank 1" in server.log


def test_two_engines_on_one_host_and_the_death_of_server_and_engine() -> None:
    """Each has ports and sockets of its own. Nothing outlives a server; ranks end with their
    engine."""
    servers = [launch(models.path("R-bf16"), *FLAGS, "-tp", "2") for _ in range(2)]
    try:
        for server in servers:
            server.wait_ready(120.0)
        first, second = map(processes_of, servers)
        ids = [s.complete(PROMPT, max_tokens=8)["choices"][0]["token_ids"] for s in servers]
        assert ids[0] == ids[1]
        servers[0].process.kill()
        until(lambda: all(map(gone, first)), "the killed server's processes are gone")
        stream = Streaming(servers[1])
        os.kill(second[0], signal.SIGKILL)
        assert "signal 9" in stream.error()
        until(lambda: all(map(gone, second)), "the killed engine's ranks are gone")
        assert servers[1].process.wait(WITHIN) == 1
    finally:
        for server in servers:
            server.kill()
            server._log_file.unlink(missing_ok=True)


def test_sizes_that_do_not_fit_are_refused_before_anything_is_loaded() -> None:
    server = launch(models.path("R-bf16"), *FLAGS, "-tp", "5")
    try:
        assert server.process.wait(60) == 2
        assert "5: the model has 4 attention heads" in server.log
        assert "Traceback" not in server.log
    finally:
        server.kill()


def test_ranks_leave_nothing_behind_when_the_server_is_stopped() -> None:
    with start(models.path("R-bf16"), *FLAGS, "-tp", "2", "-pp", "2") as server:
        found = processes_of(server)
        assert len(found) == 5
        stream = Streaming(server, 40)
        server.process.send_signal(signal.SIGTERM)
        stream.join(WITHIN)
        assert stream.events[-1]["choices"][0]["finish_reason"] == "length"
        assert server.process.wait(WITHIN) == 0
        until(lambda: all(map(gone, found)), "no process is left")
        assert "Traceback" not in server.log
