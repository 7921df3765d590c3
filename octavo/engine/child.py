"""An engine process, as the one that starts and ends it sees it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Sequence

import msgspec

from octavo.config import EngineConfig, child_environment
from octavo.machine import available_cores


class EngineChild:
    """Made by ``start``."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    async def start(
        cls, command: Sequence[str], inboxes: str, outboxes: str, config: EngineConfig
    ) -> EngineChild:
        """Starts ``command`` with the addresses of its sockets, and gives it its configuration."""
        threads = config.parallel.cpu_threads or available_cores()
        process = await asyncio.create_subprocess_exec(
            *command,
            inboxes,
            outboxes,
            str(os.getpid()),
            stdin=asyncio.subprocess.PIPE,
            env=child_environment(threads),
            start_new_session=True,  # Ctrl-C is for the server: it drains, then ends the engine
        )
        assert process.stdin is not None
        process.stdin.write(msgspec.msgpack.encode(config))
        with contextlib.suppress(ConnectionError):  # it died at once: ``wait`` tells
            await process.stdin.drain()
        process.stdin.close()
        return cls(process)

    @property
    def pid(self) -> int:
        return self._process.pid

    async def wait(self) -> int:
        """Its exit code, once it has ended; of a signal the negative number."""
        return await self._process.wait()

    def kill(self) -> None:
        self._signal(signal.SIGKILL)

    async def end(self, grace: float) -> None:
        """Tells it to end, and kills it after ``grace`` seconds."""
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
