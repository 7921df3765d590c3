"""--data-parallel-backend ray, as the server sees it: a process that keeps actors in a cluster.

Ray itself is imported there alone (octavo.ray_nodes): it takes seconds and brings threads.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import logging
import os
import secrets
import signal
import sys

import msgspec

from octavo.config import EngineConfig, environment_without_keys
from octavo.types import ConfigError

logger = logging.getLogger("octavo")

FIRST_SECONDS = 60.0  # for the cluster to be found
PAUSE = 5.0  # before the process is started again
END_SECONDS = 5.0
MOST_LINE = 16 << 20  # bytes of a line; nodes print whatever they like


def check_installed() -> None:
    """Raises ConfigError."""
    if importlib.util.find_spec("ray") is None:
        raise ConfigError(
            "--data-parallel-backend ray: Ray is not installed: pip install 'octavo[ray]'"
        )


def new_secret() -> bytes:
    return secrets.token_hex(32).encode()


class RayBackend:
    """Asks Ray for the replicas that join. ``model``: what the nodes find it by."""

    def __init__(self, config: EngineConfig, model: str, endpoint: str, secret: bytes) -> None:
        parallel = config.parallel
        tokens = ["serve", model, "--headless"]
        tokens += ["--data-parallel-rpc-port", endpoint.rpartition(":")[2]]
        if config.model.revision:
            tokens += ["--revision", config.model.revision]
        if config.model.load_format != "auto":
            tokens += ["--load-format", config.model.load_format]
        if parallel.cpu_threads:
            tokens += ["--cpu-threads", str(parallel.cpu_threads)]
        self._task = {
            "count": parallel.num_joining,
            "num_gpus": parallel.world_size,
            "num_cpus": (parallel.cpu_threads or 1) * parallel.world_size,
            "tokens": tokens,
            "host": "" if parallel.joined_everywhere else parallel.data_parallel_address,
            "secret": secret.decode(),
        }
        self._process: asyncio.subprocess.Process | None = None
        self._watch: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Returns once the cluster is found; raises ConfigError where there is none."""
        await self._spawn()
        try:
            first = await asyncio.wait_for(self._line(), FIRST_SECONDS)
        except TimeoutError:
            raise ConfigError(
                f"--data-parallel-backend ray: the cluster has not answered within "
                f"{FIRST_SECONDS:g} s; does `ray status` answer here?"
            ) from None
        if error := first.get("error"):
            raise ConfigError(f"--data-parallel-backend ray: {error}")
        logger.info("%s", first.get("news") or "the process that speaks to Ray has ended")
        self._watch = asyncio.create_task(self._keep())

    async def close(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.gather(self._watch, return_exceptions=True)
        process = self._process
        if process is None or process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGINT)  # of SIGTERM Ray makes a crash report
        try:
            await asyncio.wait_for(process.wait(), END_SECONDS)
        except TimeoutError:
            process.kill()
            await process.wait()

    async def _spawn(self) -> None:
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "octavo.ray_nodes", str(os.getpid()),
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
            env=environment_without_keys(), start_new_session=True, limit=MOST_LINE,
        )  # fmt: skip
        assert self._process.stdin is not None
        self._process.stdin.write(msgspec.json.encode(self._task))
        with contextlib.suppress(ConnectionError):
            await self._process.stdin.drain()
        self._process.stdin.close()

    async def _line(self) -> dict[str, str]:
        """The next one that is for us; {} at the end."""
        assert self._process is not None and self._process.stdout is not None
        while raw := await self._process.stdout.readline():
            with contextlib.suppress(msgspec.DecodeError):  # Ray prints what nodes print here
                return msgspec.json.decode(raw, type=dict[str, str])
            sys.stderr.write(raw.decode(errors="replace"))
        return {}

    async def _keep(self) -> None:
        """The log gets the news; the process is started again when it ends."""
        while True:
            while told := await self._line():
                logger.log(
                    logging.ERROR if told.get("error") else logging.INFO,
                    "%s", told.get("error") or told.get("news"),
                )  # fmt: skip
            logger.error("the process that speaks to Ray has ended; again in %g s", PAUSE)
            await asyncio.sleep(PAUSE)
            await self._spawn()
