"""What starts an engine for its client, and what the client then holds: a process of this machine.

This is the seam between a replica's place and its use. ``Launcher`` says where the sockets are and
starts the engine; ``ProcessClient`` and all above it know nothing else of where it runs. Further
places (another machine) are further launchers.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec
import zmq

from octavo.config import EngineConfig, child_environment
from octavo.machine import available_cores
from octavo.types import EngineDead

ENGINE_COMMAND = (sys.executable, "-m", "octavo.engine.process")


class Launched(Protocol):
    """An engine that was started, as its client sees it."""

    @property
    def pid(self) -> int:
        """Of its process, on whatever machine."""

    @property
    def clock_offset(self) -> float:
        """Seconds to add to its ``time.monotonic()`` to get this machine's."""

    async def wait(self) -> str:
        """Returns once it has ended: "" after a clean exit, else how ("by signal 9")."""

    async def leaving(self) -> None:
        """Returns once its machine is wanted back: it is to get nothing new, and to end when it has
        finished what it has."""

    def kill(self, why: str = "", user_error: bool = False) -> None:
        """Ends it now. Idempotent. ``why``: for whoever started it elsewhere; ``user_error``: that
        one must mend something first."""

    async def end(self, grace: float) -> None:
        """Tells it to end, ends it by force after ``grace`` seconds, and waits for that."""


class Launcher(Protocol):
    """A place where an engine can run."""

    @property
    def place(self) -> str:
        """For people: "this machine, GPUs 0 and 1"."""

    def bind(
        self, socket: zmq.Socket[Any], directory: Path, name: str, on_cut: Callable[[], None]
    ) -> None:
        """Binds a client's socket where the engine will look for it. ``name``: "inbox-0" …; the
        directory is the client's own. ``on_cut`` is called in the running event loop when a
        connection of the socket has ended, and messages may be lost. Raises ZMQError or
        ConfigError."""

    def unbind(self) -> None:
        """Before the bound sockets are closed."""

    def address(self, directory: Path, name: str) -> str:
        """What the engine connects to for that socket; asked for once it is bound (where it is not
        bound by this process, by another one of this machine)."""

    async def launch(self, inboxes: str, outboxes: str, config: EngineConfig) -> Launched:
        """Starts an engine and gives it its sockets' addresses, joined by commas, and its
        configuration. May wait until there is a place. Raises ConfigError or EngineDead."""


class LocalLauncher:
    """A process of this machine. ``devices``: CUDA_VISIBLE_DEVICES for it; None: as it is here."""

    def __init__(self, command: Sequence[str] = ENGINE_COMMAND, devices: str | None = None) -> None:
        self._command = list(command)
        self._devices = devices

    @property
    def place(self) -> str:
        return "this machine" + (f", GPU {self._devices}" if self._devices else "")

    def bind(
        self, socket: zmq.Socket[Any], directory: Path, name: str, on_cut: Callable[[], None]
    ) -> None:
        socket.bind(self.address(directory, name))

    def unbind(self) -> None:
        pass

    def address(self, directory: Path, name: str) -> str:
        return f"ipc://{directory}/{name}"

    async def launch(self, inboxes: str, outboxes: str, config: EngineConfig) -> EngineChild:
        threads = config.parallel.cpu_threads or available_cores()
        try:
            process = await asyncio.create_subprocess_exec(
                *self._command,
                inboxes,
                outboxes,
                str(os.getpid()),
                stdin=asyncio.subprocess.PIPE,
                env=child_environment(threads, self._devices),
                start_new_session=True,  # Ctrl-C is for the server: it drains, then ends the engine
            )
        except OSError as error:
            raise EngineDead(f"cannot start an engine process: {error.strerror}") from None
        assert process.stdin is not None
        process.stdin.write(msgspec.msgpack.encode(config))
        with contextlib.suppress(ConnectionError):  # it died at once: ``wait`` tells
            await process.stdin.drain()
        process.stdin.close()
        return EngineChild(process)


class EngineChild:
    """A child process; made by ``LocalLauncher``."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def clock_offset(self) -> float:
        return 0.0

    async def wait(self) -> str:
        code = await self._process.wait()
        if code == 0:
            return ""
        return f"by signal {-code}" if code < 0 else f"with exit code {code}"

    async def leaving(self) -> None:
        await asyncio.Event().wait()

    def kill(self, why: str = "", user_error: bool = False) -> None:
        self._signal(signal.SIGKILL)

    async def end(self, grace: float) -> None:
        self._signal(signal.SIGTERM)
        try:
            await asyncio.wait_for(self._process.wait(), grace)
        except TimeoutError:
            self.kill()
            await self._process.wait()

    def _signal(self, number: int) -> None:
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)
