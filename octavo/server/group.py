"""--api-server-count: further API processes on the same port, for the same engine.

The first process is the server it would be alone: it owns the engine, starts the others, restarts
those that die, and ends them when it ends. Each has its own event loop, requests, keys and health;
the kernel spreads the connections (SO_REUSEPORT). What they share is the engine (``engine.seats``)
and the directory of its sockets, where each leaves its metrics for the others.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec

from octavo.config import EngineConfig, ServerConfig

logger = logging.getLogger("octavo")

READY = b"ready\n"  # what a process writes when it can serve
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 30.0  # seconds before one that died is started again
LOOK_SECONDS = 1.0  # between two looks at whether the others go on
MOST_SILENCE = 10.0  # seconds without a snapshot of its metrics: its event loop stands still


class MemberSettings(msgspec.Struct):
    """What a further process is given on its stdin."""

    config: EngineConfig
    server: ServerConfig  # with the port that was bound
    model_path: str
    model_name: str
    is_gguf: bool
    directory: str
    index: int
    parent: int


class Group:
    """The further processes, as the first one sees them. ``on_death``: called with the seat and the
    pid of one that has died."""

    def __init__(
        self, settings: MemberSettings, count: int, on_death: Callable[[int, int], None]
    ) -> None:
        self._settings = settings
        self._on_death = on_death
        self._processes: dict[int, asyncio.subprocess.Process] = {}
        self._ready = {index: asyncio.Event() for index in range(1, count)}
        self._ending = False
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        for index in self._ready:
            self._tasks.append(asyncio.create_task(self._keep(index)))
        self._tasks.append(asyncio.create_task(self._watch()))

    async def ready(self) -> None:
        await asyncio.gather(*(event.wait() for event in self._ready.values()))

    def signal(self, number: int) -> None:
        """To all; those that end from now on are not started again."""
        self._ending = True
        for process in self._processes.values():
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.send_signal(number)

    async def ended(self) -> None:
        for process in list(self._processes.values()):
            await process.wait()

    async def close(self) -> None:
        """Kills what is left."""
        self.signal(signal.SIGKILL)
        await self.ended()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _keep(self, index: int) -> None:
        """Keeps a process in that seat: starts it, and another whenever it dies."""
        loop = asyncio.get_running_loop()
        pause = FIRST_PAUSE
        while not self._ending:
            began = loop.time()
            process = await self._spawn(index)
            self._processes[index] = process
            if self._ending:  # ``signal`` came before the process was known
                process.kill()
            assert process.stdout is not None
            while line := await process.stdout.readline():
                if line == READY:
                    self._ready[index].set()
            code = await process.wait()
            if self._ending:
                return
            self._on_death(index, process.pid)
            if loop.time() - began > LONGEST_PAUSE:
                pause = FIRST_PAUSE
            logger.error(
                "API process %d ended with code %d; starting it again in %g s", index, code, pause
            )
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)

    async def _watch(self) -> None:
        """Kills a process that stands still: it would be given connections and never answer."""
        loop, board = asyncio.get_running_loop(), Board(Path(self._settings.directory))
        since: dict[int, tuple[int, float]] = {}  # pid -> its last snapshot, and when it was new
        looked = loop.time()
        while not self._ending:
            await asyncio.sleep(LOOK_SECONDS)
            before, looked = looked, loop.time()
            if looked - before > 2 * LOOK_SECONDS:
                since.clear()  # this process was held up itself, perhaps with all others
            for index, process in self._processes.items():
                version = board.version(process.pid)
                known = since.get(process.pid)
                if version is None or process.returncode is not None:
                    since.pop(process.pid, None)
                elif known is None or known[0] != version:
                    since[process.pid] = version, looked
                elif looked - known[1] > MOST_SILENCE:
                    logger.error(
                        "API process %d has stood still for %.0f s: killing it",
                        index, looked - known[1],
                    )  # fmt: skip
                    process.kill()

    async def _spawn(self, index: int) -> asyncio.subprocess.Process:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "octavo.server.member",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is for the first process
        )
        settings = msgspec.structs.replace(self._settings, index=index, parent=os.getpid())
        assert process.stdin is not None
        process.stdin.write(msgspec.msgpack.encode(settings))
        with contextlib.suppress(ConnectionError):
            await process.stdin.drain()
        process.stdin.close()
        return process


class Board:
    """Where each process of a group leaves a snapshot of its metrics: files of one directory."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._own = directory / f"metrics-{os.getpid()}"

    def write(self, raw: bytes) -> None:
        """Replaces our snapshot."""
        new = self._own.with_suffix(".new")
        with contextlib.suppress(OSError):  # the first process has ended, and removed everything
            new.write_bytes(raw)
            os.replace(new, self._own)

    def others(self) -> list[bytes]:
        found = []
        for path in sorted(self._directory.glob("metrics-*")):
            if path != self._own and path.suffix != ".new":
                with contextlib.suppress(OSError):
                    found.append(path.read_bytes())
        return found

    def version(self, pid: int) -> int | None:
        """Changes with each snapshot that a process writes; None before the first."""
        try:
            return (self._directory / f"metrics-{pid}").stat().st_mtime_ns
        except OSError:
            return None

    def take(self, pid: int) -> bytes | None:
        """The last snapshot of a process that has died, which is removed; None if it left none."""
        path = self._directory / f"metrics-{pid}"
        try:
            raw = path.read_bytes()
            path.unlink()
        except OSError:
            return None
        return raw
