"""Whichever process of a server is killed, none is left behind: the server ends, or replaces it."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import httpx
import pytest

from tests.fixtures import models, server
from tests.fixtures.waiting import until

pytestmark = pytest.mark.net
BODY = {"prompt": "x", "max_tokens": 8, "guided_regex": "[a-c]{3}"}
FLAGS = ("--tensor-parallel-size", "2", "--api-server-count", "2")


def tree(root: int) -> dict[int, str]:
    """Command lines by process id, of a process and all below it."""
    found, todo = {}, [root]
    while todo:
        pid = todo.pop()
        try:
            found[pid] = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
            for children in Path(f"/proc/{pid}/task").glob("*/children"):
                todo += map(int, children.read_text().split())
        except OSError:
            found.pop(pid, None)
    return found


def lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


@pytest.mark.parametrize(
    ("victim", "ends"),
    [
        ("octavo.cli.main", True),
        ("octavo.engine.process", True),
        ("octavo.worker.process", True),
        ("octavo.server.member", False),
        ("octavo.grammar.checker", False),
    ],
)
def test_nothing_is_left_of_a_server_whose_process_is_killed(victim: str, ends: bool) -> None:
    environment = {"CUDA_VISIBLE_DEVICES": ""}
    with server.start(models.path("R"), *FLAGS, env=environment, clean=False) as running:

        def ask() -> int:
            return httpx.post(f"{running.url}/v1/completions", json=BODY, timeout=60).status_code

        def all_are_there() -> dict[int, str]:
            assert ask() == 200
            before = tree(running.process.pid)
            return before if any(victim in command for command in before.values()) else {}

        before = until(all_are_there)
        os.kill(max(pid for pid, command in before.items() if victim in command), signal.SIGKILL)
        if ends:
            until(lambda: not any(map(lives, before)), lambda: tree(running.process.pid))
        else:
            until(lambda: victim in str(tree(running.process.pid).values()) or not ask())
            assert ask() == 200
