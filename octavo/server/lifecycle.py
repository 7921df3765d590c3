"""A server from its bound socket to its exit code.

Order of a start: bind the port (a taken one fails at once), start the engine process, load the
tokenizer and the web framework while the model loads, answer 503 until it is ready. Order of an
end: SIGTERM or Ctrl-C → not ready, nothing new, what runs finishes for --drain-timeout, then error
events; a second signal ends it now. A dead engine: 503 for five seconds, then exit code 1.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Awaitable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import uvloop

from octavo import collector
from octavo.checkpoint.locate import ModelFiles
from octavo.config import EngineConfig, ServerConfig, cluster_secret
from octavo.engine.client import Seat
from octavo.engine.door import Door
from octavo.engine.joining import checkpoint_facts
from octavo.engine.launch import ENGINE_COMMAND
from octavo.engine.messages import EngineInfo, EngineStats, Progress
from octavo.engine.placement import local_replicas
from octavo.engine.ray_backend import RayBackend, check_installed, new_secret
from octavo.engine.replicas import Replicas
from octavo.logs import logging_to_stderr
from octavo.server.group import Board, Group, MemberSettings
from octavo.server.loading import Loading
from octavo.types import ConfigError, EngineDead

if TYPE_CHECKING:
    from octavo.server.workers import Workers

logger = logging.getLogger("octavo")

DEAD_SECONDS = 5.0  # of 503 before a server without an engine ends
STATS_INTERVAL = 10.0
MEMBER_SECONDS = 3.0  # for the further API processes to end, after all have drained
KEYS_INTERVAL = 1.0  # at which --api-key-file is looked at


class StartLog(Protocol):
    """Who shows the start to the user (cli.startup)."""

    def progress(self, phase: str, fraction: float, num_bytes: int = 0, /) -> None: ...

    def enter(self, part: str) -> None: ...

    def ready(self, info: EngineInfo, address: str) -> None: ...


def serve(
    config: EngineConfig,
    server: ServerConfig,
    files: ModelFiles,
    log: StartLog,
    engine_command: Sequence[str] | None = None,
) -> int:
    """Runs until told to stop. Returns the exit code: 0 after a drain, 1 when the engine died.

    ``engine_command`` replaces the engine process (tests). Raises ConfigError for what the user
    can mend: a taken port, a model that cannot be loaded.
    """
    if server.api_server_count > 1 and config.parallel.num_joining:
        raise ConfigError(
            f"--api-server-count {server.api_server_count} with replicas that join: not in this "
            "version; use 1"
        )
    listener, address = bind(server)
    try:
        running = Server(config, server, files, log, listener, address, engine_command)
        with logging_to_stderr(server.uvicorn_log_level, server.log_format):
            code = uvloop.run(running.run())
        running.leave(code)
        return code
    finally:
        listener.close()
        if server.uds:
            Path(server.uds).unlink(missing_ok=True)


def bind(server: ServerConfig, checked: bool = False) -> tuple[socket.socket, str]:
    """The listening socket and the address a client connects to. With several API processes each
    has a socket of its own on the same port; ``checked``: it is known that no other server has
    it. Raises ConfigError when it cannot be had."""
    several = server.api_server_count > 1
    if several and server.uds:
        raise ConfigError("--api-server-count needs a port: drop --uds, or the count")
    if several and not checked and server.port:
        bind(replace(server, api_server_count=1))[0].close()  # fails where SO_REUSEPORT would not
    if server.uds:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        place, address = f"--uds {server.uds}", f"unix:{server.uds}"
        target: object = server.uds
        if Path(server.uds).is_socket() and not _answers(server.uds):
            Path(server.uds).unlink()  # left behind by a server that was killed
    else:
        family = socket.AF_INET6 if ":" in server.host else socket.AF_INET
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if several:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        place, target = f"port {server.port} on {server.host}", (server.host, server.port)
        address = ""
    try:
        listener.bind(target)  # type: ignore[arg-type]
        listener.listen(2048)
    except OSError as error:
        listener.close()
        hint = "; choose another with --port (0: any free one)"
        if server.uds:
            hint = ""
        elif error.errno == errno.EADDRNOTAVAIL or isinstance(error, socket.gaierror):
            hint = "; --host must be an address of this machine (0.0.0.0: all of them)"
        raise ConfigError(f"{place}: {error.strerror or error}{hint}") from None
    if not address:
        host = f"[{server.host}]" if ":" in server.host else server.host
        scheme = "https" if server.ssl_certfile else "http"
        shown = "127.0.0.1" if host == "0.0.0.0" else host
        address = f"{scheme}://{shown}:{listener.getsockname()[1]}"
    return listener, address


def _answers(path: str) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(path)
        except OSError:
            return False
        return True


class Server:
    """One run of ``serve``, or of a further API process (``group``), which binds its own socket."""

    def __init__(
        self,
        config: EngineConfig,
        server: ServerConfig,
        files: ModelFiles,
        log: StartLog,
        listener: socket.socket | None,
        address: str,
        engine_command: Sequence[str] | None,
        seat: Seat | None = None,
    ) -> None:
        self._config, self._server = config, server
        self._files, self._log = files, log
        self._listener, self._address = listener, address
        self._seat = seat or Seat(0, server.api_server_count)
        specs = local_replicas(config, engine_command or ENGINE_COMMAND)
        self._door: Door | None = None
        self._ray: RayBackend | None = None
        if config.parallel.num_joining:
            self._open_door()
            assert self._door is not None
            specs += self._door.specs()
        self._client = Replicas(specs, self._show_progress, self._seat)
        self._loading = Loading()
        self._group: Group | None = None
        self._signals = 0
        self._stop = asyncio.Event()
        self._workers: Workers | None = None

    def _open_door(self) -> None:
        """For the replicas that join, and asks Ray for them where it is to give them."""
        config, files = self._config, self._files
        parallel = config.parallel
        facts = checkpoint_facts(files.path, config.model.load_format != "dummy")
        if parallel.data_parallel_backend != "ray":
            self._door = Door(config, facts)
            return
        check_installed()
        secret = cluster_secret(parallel.cluster_secret_file) or new_secret()
        self._door = Door(config, facts, secret)
        model = str(files.path.resolve()) if Path(files.name).exists() else files.name
        self._ray = RayBackend(config, model, self._door.endpoint, secret)

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal)
        http: asyncio.Task[None] | None = None
        try:
            if self._door is not None:
                self._door.start()
            self._log.enter("engine")
            await self._client.start()
            if self._seat.count > 1 and self._seat.index == 0:
                self._group = self._make_group()
                self._group.start()
            self._make_app()
            if self._listener is not None:
                http = self._listen(self._listener)
            if self._ray is not None:
                await self._ray.start()
            if not self._config.model.skip_tokenizer_init:
                await asyncio.to_thread(self._load_text)
            ended = await self._until(self._client.ready())
            self._log.enter("opening the doors")
            if ended or (self._group is not None and await self._until(self._group.ready())):
                return 0
            if self._listener is None:  # a further process takes no connection before it can serve
                self._listener, self._address = bind(self._server, checked=True)
                http = self._listen(self._listener)
            self._announce()
            return await self._serve()
        except EngineDead as error:
            logger.error("%s", error)
            return 1
        finally:
            if self._group is not None:
                await self._group.close()
            await self._client.close()
            if self._ray is not None:
                await self._ray.close()
            if self._door is not None:
                await self._door.close()
            if self._workers is not None:  # the app was made
                await self._state.grammars.close()
            if http is not None:
                self._http.should_exit = True
                await http

    def _make_group(self) -> Group:
        assert self._listener is not None
        settings = MemberSettings(
            self._config,
            replace(self._server, port=self._listener.getsockname()[1]),
            str(self._files.path),
            self._files.name,
            self._files.is_gguf,
            str(self._client.directory),
            index=0,
            parent=0,
        )
        return Group(settings, self._seat.count, self._on_member_death)

    def _on_member_death(self, index: int, pid: int) -> None:
        self._client.forget_client(index)
        self._state.metrics.settle_member(pid)

    def leave(self, code: int) -> None:
        """Ends the process here and now where a thread is still at work for a client that is gone:
        the interpreter would wait for it, for seconds."""
        if self._workers is not None and self._workers.close():
            if self._server.uds:
                Path(self._server.uds).unlink(missing_ok=True)
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    # ---- start ----

    def _make_app(self) -> None:
        """Imports the web framework, while the engine loads."""
        from octavo.server.app import create_app
        from octavo.server.http import HTTPServer
        from octavo.server.state import ServerState

        self._state = ServerState(self._config, self._server, self._client, self._loading)
        self._workers = self._state.workers
        self._http = HTTPServer(create_app(self._state), self._server)

    def _listen(self, listener: socket.socket) -> asyncio.Task[None]:
        return asyncio.create_task(self._http.serve(sockets=[listener]))

    def _load_text(self) -> None:
        from octavo.server.tools.setup import Parsing
        from octavo.text.chat import load_chat_template
        from octavo.text.tokenizer import load_tokenizer

        tokenizer = load_tokenizer(self._files.path, self._config.model.tokenizer)
        template = load_chat_template(
            tokenizer, self._server.chat_template, self._server.chat_template_content_format
        )
        self._state.parsing = Parsing(self._server, tokenizer, template)
        self._state.byte_table = tokenizer.byte_table(tokenizer.vocab_size)
        self._state.tokenizer, self._state.template = tokenizer, template

    def _show_progress(self, progress: Progress) -> None:
        self._loading.take(progress)
        self._log.progress(progress.phase, progress.fraction, progress.num_bytes)

    def _announce(self) -> None:
        info = self._client.info
        self._state.metrics.size_by_tokens(info.max_model_len)
        if self._seat.count > 1:
            self._state.metrics.share(Board(self._client.directory))
        if self._state.tokenizer is not None:
            # The engine makes its tables of it while it is idle.
            self._client.send_vocabulary(self._state.vocabulary())
        collector.settle()
        self._state.loaded = True
        self._log.ready(info, self._address)
        if self._state.template is None and not self._config.model.skip_tokenizer_init:
            logger.warning(
                "%s has no chat template: /v1/chat/completions will answer 400; give one with "
                "--chat-template FILE",
                self._state.model_names[0],
            )

    # ---- run and end ----

    async def _serve(self) -> int:
        tasks = [
            asyncio.create_task(self._log_stats()),
            asyncio.create_task(self._watch_keys()),
            asyncio.create_task(self._state.metrics.keep_shared()),
        ]
        try:
            if not await self._until(self._client.dead.wait()):
                logger.error("%s; ending in %g s", self._client.problem(), DEAD_SECONDS)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._stop.wait(), DEAD_SECONDS)
                return 1
            await self._drain()
            self._state.metrics.share_last()
            return 0
        finally:
            for task in tasks:
                task.cancel()

    async def _watch_keys(self) -> None:
        while True:
            await asyncio.sleep(KEYS_INTERVAL)
            self._state.keys.reload()

    async def _until(self, event: Awaitable[object]) -> bool:
        """Waits for ``event`` (an awaitable); True if a signal to stop came first."""
        waited = asyncio.ensure_future(event)
        stop = asyncio.create_task(self._stop.wait())
        await asyncio.wait((waited, stop), return_when=asyncio.FIRST_COMPLETED)
        stop.cancel()
        if waited.done():
            waited.result()
            return False
        waited.cancel()
        return True

    def _on_signal(self) -> None:
        self._signals += 1
        self._stop.set()
        if self._group is not None:
            self._group.signal(signal.SIGTERM)
        if self._signals > 1:
            self._client.fail_all(EngineDead("the server was told to stop at once"))

    async def _drain(self) -> None:
        """Lets what runs finish; after the timeout, or a second signal, ends it with an error."""
        client, timeout = self._client, self._server.drain_timeout
        client.drain()
        if client.num_open:
            logger.info("draining: %d sequences, at most %g s", client.num_open, timeout)
        deadline = time.monotonic() + timeout
        while self._state.num_in_flight and self._signals < 2 and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        if self._group is not None:  # they drain as long, then write their last events
            with contextlib.suppress(TimeoutError):
                left = max(0.0, deadline - time.monotonic())
                await asyncio.wait_for(self._group.ended(), left + MEMBER_SECONDS)
        client.fail_all(EngineDead("the server is shutting down"))
        for _ in range(50):  # the last events are being written
            if not self._state.num_in_flight:
                break
            await asyncio.sleep(0.02)

    async def _log_stats(self) -> None:
        if self._server.disable_log_stats or self._seat.index:
            return
        metrics, client = self._state.metrics, self._client
        count = len(client.replicas)
        before = (0, 0)
        while True:
            await asyncio.sleep(STATS_INTERVAL)
            totals = metrics.totals()
            now = (totals.num_prompt_tokens, totals.num_generated_tokens)
            if now == before and not totals.num_running + totals.num_waiting:
                continue
            stats = client.stats
            blocks = stats.blocks_used + stats.blocks_cached + stats.blocks_free
            hits = stats.prefix_hits / stats.prefix_queries if stats.prefix_queries else 0.0
            logger.info(
                "prompt %.1f tokens/s, generation %.1f tokens/s, running %d, waiting %d, "
                "KV cache %.1f %%, prefix hits %.1f %%, preemptions %d%s%s",
                (now[0] - before[0]) / STATS_INTERVAL,
                (now[1] - before[1]) / STATS_INTERVAL,
                totals.num_running,
                totals.num_waiting,
                100 * stats.blocks_used / blocks if blocks else 0.0,
                100 * hits,
                stats.num_preemptions,
                speculation_line(stats),
                f", {client.num_serving} of {count} replicas serve" if count > 1 else "",
                extra={"fields": {"event": "stats"}},  # of JSON lines, to find them by
            )
            before = now


def speculation_line(stats: EngineStats) -> str:
    """For the statistics line; empty before anything was guessed."""
    if not stats.num_draft_tokens:
        return ""
    return (
        f", guesses {stats.draft_length:.1f} a step, "
        f"{stats.num_accepted_drafts / stats.num_draft_tokens:.1%} right, "
        f"{stats.saved_seconds:.1f} s saved"
    )
