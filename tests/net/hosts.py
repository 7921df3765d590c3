"""Two hosts in one: network namespaces that are joined by a veth pair, whose link can be cut.

Needs root and iproute2. Processes of a host see its network alone; the tests reach a server on it
over a Unix socket (``--uds``), for the file system is everybody's.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

SECRET = "the secret of these two hosts, 32 bytes"
ROOT = Path(__file__).parents[2]


def unavailable() -> str:
    """Why namespaces cannot be had here, or ""."""
    if os.geteuid():
        return "network namespaces need root"
    if not shutil.which("ip"):
        return "network namespaces need iproute2 (the command ip)"
    name = f"octavo-probe-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    if made.returncode:
        return f"ip netns add: {made.stderr.strip()}"
    subprocess.run(["ip", "netns", "del", name], check=True)
    return ""


class Host:
    """A network namespace. ``address``: on the link to the other one."""

    def __init__(self, name: str, address: str, directory: Path) -> None:
        self.name, self.address = name, address
        self.device = f"v{name[-12:]}"  # at most 15 characters
        self.directory = directory
        self._processes: list[Process] = []

    def start(
        self, *command: str, clock_ahead: int = 0, env: dict[str, str] | None = None
    ) -> Process:
        """Runs a command on this host; its output goes to a file. ``clock_ahead``: seconds by which
        ``time.monotonic()`` is ahead there, as on a machine that was booted earlier."""
        prefix = ["ip", "netns", "exec", self.name]
        if clock_ahead:
            prefix += ["unshare", "--time", "--fork", "--kill-child", "--monotonic"]
            prefix += [str(clock_ahead)]
        log = self.directory / f"{self.name}-{len(self._processes)}.log"
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OCTAVO_CLUSTER_SECRET": SECRET}
        with log.open("wb") as output:
            popen = subprocess.Popen(
                [*prefix, *command], stdin=subprocess.DEVNULL, stdout=output,
                stderr=subprocess.STDOUT, env={**environment, **(env or {})},
            )  # fmt: skip
        process = Process(popen, log)
        self._processes.append(process)
        return process

    def serve(self, model: Path, *flags: str, **options: Any) -> Process:
        """``octavo serve MODEL FLAGS`` on this host."""
        octavo = (sys.executable, "-m", "octavo.cli.main", "serve", str(model))
        return self.start(*octavo, *flags, **options)

    def link(self, up: bool) -> None:
        """Plugs this host's end of the cable in, or out."""
        state = "up" if up else "down"
        subprocess.run(["ip", "-n", self.name, "link", "set", self.device, state], check=True)

    def end(self) -> None:
        for process in self._processes:
            process.kill()


class Process:
    def __init__(self, popen: subprocess.Popen[bytes], log: Path) -> None:
        self.popen, self._log = popen, log

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def wait_for(self, text: str, seconds: float = 60.0, count: int = 1) -> None:
        """Until ``text`` is in its output so often."""
        until(lambda: self.log.count(text) >= count, seconds, lambda: f"no {text!r}:\n{self.log}")

    def stop(self, seconds: float = 40.0) -> int:
        """SIGTERM; its exit code."""
        self.popen.send_signal(signal.SIGTERM)
        return self.popen.wait(seconds)

    def kill(self) -> None:
        if self.popen.poll() is None:
            self.popen.kill()
        self.popen.wait()


class Link:
    """``near`` and ``far``: the two hosts."""

    def __init__(self, near: Host, far: Host) -> None:
        self.near, self.far = near, far

    def cut(self) -> None:
        self.far.link(up=False)

    def mend(self) -> None:
        self.far.link(up=True)


@contextmanager
def two_hosts(directory: Path) -> Iterator[Link]:
    """Removed at the end, with all that runs on them. The caller skips where ``unavailable``."""
    number = os.getpid() % 250
    hosts = [
        Host(f"oct{os.getpid()}{side}", f"10.213.{number}.{index}", directory)
        for index, side in ((1, "a"), (2, "b"))
    ]

    def ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True, capture_output=True)

    try:
        for host in hosts:
            ip("netns", "add", host.name)
            ip("-n", host.name, "link", "set", "lo", "up")
        near, far = hosts
        ip("link", "add", near.device, "netns", near.name, "type", "veth", "peer", "name",
           far.device, "netns", far.name)  # fmt: skip
        for host in hosts:
            ip("-n", host.name, "addr", "add", f"{host.address}/24", "dev", host.device)
            ip("-n", host.name, "link", "set", host.device, "up")
        yield Link(near, far)
    finally:
        for host in hosts:
            host.end()
            with contextlib.suppress(subprocess.CalledProcessError):
                ip("netns", "del", host.name)


def client_of(socket: Path) -> httpx.Client:
    """Of a server that listens on a Unix socket."""
    transport = httpx.HTTPTransport(uds=str(socket))
    return httpx.Client(transport=transport, base_url="http://server", timeout=120.0)


def until(
    condition: Callable[[], Any], seconds: float = 60.0, why: Callable[[], str] = lambda: ""
) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s: {why()}"
        time.sleep(0.05)
