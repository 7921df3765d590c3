"""Data parallelism: the engines of a server behind one client.

``Replicas`` is to the server what a ``ProcessClient`` is to one engine, and holds one for each
replica. A request goes to one replica (``routing``) with all its choices; its events come from that
one's client straight into its stream, so tokens take no further hop. A replica that dies or stands
still is left out; what it has and of which nothing has come yet begins again on another one, the
rest ends with EngineDead. One that died is started again. When the last is gone the server is.
Never imports torch.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from octavo.engine.accounts import Origin
from octavo.engine.client import ProcessClient, Seat
from octavo.engine.dispatch import Dispatcher
from octavo.engine.joining import check_same_engine
from octavo.engine.joint_progress import JointProgress
from octavo.engine.messages import AddRequest, EngineInfo, EngineStats, Progress, num_ids
from octavo.engine.replica import (
    MOST_RESTARTS,
    RESTART_WINDOW,
    Replica,
    ReplicaSpec,
    common_info,
    computed_tokens,
    summed_stats,
)
from octavo.engine.routing import Router
from octavo.engine.streams import RequestStream
from octavo.grammar.vocabulary import Vocabulary
from octavo.types import ConfigError, EngineDead, FinishReason, OctavoError

logger = logging.getLogger("octavo")

JOIN_PAUSE = 1.0  # seconds before the place of an engine that could not join is open again


class Replicas:
    """One or more engines. Counts are of sequences (a request with n choices counts n) and of all
    replicas; ``replicas`` has them one by one."""

    def __init__(
        self,
        specs: Sequence[ReplicaSpec],
        on_progress: Callable[[Progress], None] | None = None,
        seat: Seat | None = None,
        router: Router | None = None,
    ) -> None:
        """``seat``: this process's among the clients of each engine; the first one starts them.
        ``router``: None: the one of ``routing``."""
        self.config = specs[0].config
        self.seat = seat or Seat()
        self.draining = False
        # Told of each step: the replica's number, and its statistics.
        self.on_step: Callable[[int, EngineStats], None] = lambda index, stats: None
        self._progress = JointProgress(
            sum(not spec.joins for spec in specs), on_progress or (lambda progress: None)
        )
        self._info: EngineInfo | None = None
        self._vocabulary: Vocabulary | None = None
        self._next_handle = self.seat.first_handle
        self._tasks: list[asyncio.Task[None]] = []
        self._closing = False
        self._specs = list(specs)
        self.replicas: list[Replica] = []
        self._router = router or Router()
        caching = self.config.cache.enable_prefix_caching
        self._dispatcher = Dispatcher(self.replicas, self._router, caching)

    # ---- life ----

    async def start(self) -> None:
        """Starts all engines and returns at once; ``ready`` waits for them. Raises ConfigError when
        the temporary directory cannot hold the sockets."""
        self._loop = asyncio.get_running_loop()
        self.dead = asyncio.Event()
        self._opened = asyncio.Event()
        self.directory = self.seat.directory or Path(tempfile.mkdtemp(prefix="octavo-"))
        for spec in self._specs:
            self._make(spec)
        own = [replica for replica in self.replicas if not replica.spec.joins]
        await asyncio.gather(*(replica.client.start() for replica in own))
        for replica in self.replicas:
            if replica.spec.joins:
                self._tasks.append(self._loop.create_task(self._take_in(replica)))

    async def ready(self) -> EngineInfo:
        """Waits until all that do not join have loaded, or else one that does. Raises ConfigError
        (the user can mend it) or EngineDead as soon as one cannot."""
        own = [replica for replica in self.replicas if not replica.spec.joins]
        waiting = [self._loop.create_task(self._loaded(replica)) for replica in own]
        try:
            await asyncio.gather(*waiting)
        finally:
            for task in waiting:
                task.cancel()
        if own:
            self._serve_with(own)
        for replica in own:
            self._tasks.append(self._loop.create_task(self._keep(replica)))
        await self._opened.wait()
        return self.info

    def _serve_with(self, replicas: list[Replica]) -> None:
        """From now on requests are taken, and those who join are measured by these."""
        self._info = common_info(replicas)
        self._opened.set()

    @property
    def info(self) -> EngineInfo:
        """What holds for every replica. Raises EngineDead before it is known."""
        if self._info is None:
            raise EngineDead("the model is still loading")
        return self._info

    @property
    def alive(self) -> bool:
        """Whether there is an engine that serves or may come to."""
        return any(replica.client.alive for replica in self.replicas)

    def problem(self) -> str | None:
        """Why nothing can be served now, or None while one replica serves."""
        if problem := self._dispatcher.problem():
            return problem
        return None if self._info is not None else "the model is still loading"

    def drain(self) -> None:
        """Nothing new is taken from now on; each engine ends after its last output."""
        self.draining = True
        for replica in self.replicas:
            replica.client.drain()

    async def close(self, grace: float = 2.0) -> None:
        """Ends the engines (killing them after ``grace`` seconds) and removes the sockets."""
        self._closing = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(replica.client.close(grace) for replica in self.replicas))
        if self.seat.directory is None:
            shutil.rmtree(self.directory, ignore_errors=True)

    # ---- counts ----

    @property
    def num_open(self) -> int:
        """Sequences that have not ended."""
        return sum(replica.client.num_open for replica in self.replicas)

    @property
    def num_serving(self) -> int:
        """Replicas that take requests now."""
        return sum(replica.serves for replica in self.replicas)

    @property
    def stats(self) -> EngineStats:
        """Sums over the replicas."""
        return summed_stats([replica.stats for replica in self.replicas])

    @property
    def most_queued(self) -> int:
        """How many requests may wait. Raises EngineDead as ``submit`` does."""
        return sum(replica.client.most_queued for replica in self._dispatcher.serving())

    # ---- requests ----

    def allocate(self, count: int) -> int:
        """The first of ``count`` consecutive unused handles."""
        first = self._next_handle
        self._next_handle += count
        return first

    def submit(
        self, requests: Sequence[AddRequest], continuing: bool = False, hint: bytes = b""
    ) -> RequestStream:
        """Sends prepared requests, all or none, and returns the stream of their events. Each goes
        to one replica. ``continuing``: they go on with work that was admitted before, so the
        queue's bounds do not hold for them. ``hint``: see ``routing``.

        Raises EngineDead when no engine can take them, QueueFull when too much waits everywhere.
        """
        if len(self.replicas) == 1:
            return self.replicas[0].client.submit(requests, continuing)
        if continuing:
            candidates = self._dispatcher.serving()
        else:
            num_tokens = sum(num_ids(r.prompt_ids) for r in requests)
            num_sequences = sum(r.params.n for r in requests)
            candidates = self._dispatcher.with_room(len(requests), num_tokens, num_sequences)
        stream = candidates[0].client.stream_of(requests)
        try:
            for request in requests:
                self._dispatcher.place(Origin(request, hint=hint), stream, candidates)
        except EngineDead:
            self.abort(list(stream.open))
            raise
        return stream

    def check_queue(self, num_requests: int, num_tokens: int = 0, num_sequences: int = 1) -> None:
        """Raises what ``submit`` would raise for so much more, before work is spent on it."""
        self._dispatcher.with_room(num_requests, num_tokens, num_sequences)

    def abort(self, handles: Iterable[int], reason: FinishReason = FinishReason.ABORT) -> None:
        """Drops handles that are still open; their events end here and now. ``reason`` is how
        they are counted: STOP for those that met a stop string."""
        handles = list(handles)
        for replica in self.replicas:
            replica.client.abort(handles, reason)

    def fail_all(self, error: Exception) -> None:
        """Ends every open stream with ``error`` and frees their requests in the engines."""
        for replica in self.replicas:
            replica.client.fail_all(error)

    async def reset_prefix_cache(self) -> bool:
        """Whether the caches of all could be emptied (not while requests hold blocks of one, or
        one does not answer)."""
        serving = self._dispatcher.serving()
        done = await asyncio.gather(*(r.client.reset_prefix_cache() for r in serving))
        for replica, success in zip(serving, done):
            if success:
                self._router.forget(replica.index)
        silent = [r for r in self.replicas if r not in serving and r.client.alive]
        return all(done) and not silent

    def send_vocabulary(self, vocabulary: Vocabulary) -> None:
        """Before the first request with a grammar, by the first of several API processes. All of
        them give it to engines that start later, so that none comes too late with it."""
        self._vocabulary = vocabulary
        if self.seat.index:
            return
        for replica in self.replicas:
            replica.client.send_vocabulary(vocabulary)

    def forget_client(self, index: int) -> None:
        """Another client of the engines has died: what it asked for is dropped."""
        for replica in self.replicas:
            replica.client.forget_client(index)

    # ---- engines that come and go ----

    def _make(self, spec: ReplicaSpec) -> Replica:
        """A replica whose engine is yet to be started."""
        index = len(self.replicas)
        replica = Replica(index, spec, partial(self._client, index, spec))
        self.replicas.append(replica)
        self._router.add(index, 0)
        return replica

    def _client(self, index: int, spec: ReplicaSpec) -> ProcessClient:
        """Of the next engine in a replica's place."""
        directory = self.directory / str(index)
        directory.mkdir(exist_ok=True)
        name = f"replica {index}" if len(self._specs) > 1 else ""
        starting = self._info is None
        client = ProcessClient(
            spec.config,
            partial(self._progress.take, index) if starting and not spec.joins else None,
            spec.launcher,
            replace(self.seat, directory=directory),
            name,
            index,
        )
        client.on_step = lambda stats: self.on_step(index, stats)
        client.rescue = lambda entry: self._dispatcher.rescue(self.replicas[index], entry)
        client.on_replaced = lambda info: self._welcome(self.replicas[index], info)
        return client

    async def _loaded(self, replica: Replica) -> None:
        """Takes a replica into service once its engine has loaded. Raises as ``ready`` does."""
        try:
            info = await replica.client.ready()
        except OctavoError as error:
            if len(self.replicas) == 1:
                raise
            raise type(error)(f"replica {replica.index}: {error}") from None
        if replica.spec.joins:
            await self._check(replica, info)
        self._settle(replica, info)

    def _welcome(self, replica: Replica, info: EngineInfo) -> None:
        """Another API process has started a replica's engine again."""
        replica.replaced()
        self._settle(replica, info)

    def _settle(self, replica: Replica, info: EngineInfo) -> None:
        """Takes into service an engine that has loaded, and knows nothing yet."""
        replica.found = info
        self._router.add(replica.index, info.num_blocks * info.block_size)
        if self._vocabulary is not None:
            replica.client.send_vocabulary(self._vocabulary)
        if self._info is not None or all(r.found for r in self.replicas):
            self._info = common_info(self.replicas)
        now = time.monotonic()
        others = [r.load(now).recent for r in self.replicas if r is not replica and r.serves]
        mean = sum(others) / len(others) if others else 0.0
        replica.work.restart(mean, computed_tokens(replica.client.stats), now)
        replica.in_service = True

    async def _check(self, replica: Replica, info: EngineInfo) -> None:
        """Raises ConfigError where a joining engine does not fit those that serve. Those of this
        node come first; where there are none, the first that joins is the measure."""
        if all(r.spec.joins for r in self.replicas) and not self._opened.is_set():
            replica.found = info
            self._serve_with([replica])
        await self._opened.wait()
        check_same_engine(self.info, info)

    async def _take_in(self, replica: Replica) -> None:
        """Takes in one engine after the other that joins in this place."""
        while not self.draining:
            client = replica.client
            try:
                await client.start()
                await self._loaded(replica)
                logger.info(
                    "replica %d on %s serves; %d of %d serve",
                    replica.index, replica.spec.launcher.place, self.num_serving,
                    len(self.replicas),
                )  # fmt: skip
                await client.dead.wait()
                logger.warning(
                    "replica %d: %s; its place is free; %d of %d serve",
                    replica.index, client.problem(), self.num_serving, len(self.replicas),
                )  # fmt: skip
            except (ConfigError, EngineDead) as error:
                logger.error("replica %d cannot join: %s", replica.index, error)
                client.die(str(error), user_error=isinstance(error, ConfigError))
                await asyncio.sleep(JOIN_PAUSE)
            self._router.forget(replica.index)
            await client.close()
            replica.reconnect()

    async def _keep(self, replica: Replica) -> None:
        """Starts a replica's engine again whenever it has died, while others live."""
        while True:
            await replica.client.dead.wait()
            why = replica.client.problem()
            self._router.forget(replica.index)
            if not self.alive:
                self.dead.set()
                return
            pause = replica.restarts.pause(time.monotonic())
            if pause is None:
                replica.given_up = f"it was started {MOST_RESTARTS} times in {RESTART_WINDOW:g} s"
                logger.error(
                    "replica %d: %s; %s and is left out from now on; %d of %d serve",
                    replica.index, why, replica.given_up, self.num_serving, len(self.replicas),
                )  # fmt: skip
                return
            logger.error(
                "replica %d: %s; starting it again in %g s (%d of at most %d times in %g s); "
                "%d of %d serve",
                replica.index, why, pause, replica.restarts.num_recent, MOST_RESTARTS,
                RESTART_WINDOW, self.num_serving, len(self.replicas),
            )  # fmt: skip
            await asyncio.sleep(pause)
            if self.draining or self.dead.is_set():
                return
            await self._restart(replica)

    async def _restart(self, replica: Replica) -> None:
        began = time.monotonic()
        await replica.client.close()
        client = replica.reconnect()
        try:
            await client.start()
            await self._loaded(replica)
        except (ConfigError, EngineDead) as error:
            client.die(str(error))
            return
        logger.info(
            "replica %d serves again after %.1f s; %d of %d serve",
            replica.index, time.monotonic() - began, self.num_serving, len(self.replicas),
        )  # fmt: skip
