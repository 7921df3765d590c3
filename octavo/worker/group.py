"""The executor of several ranks, each a process of its own. Never imports torch.

It starts those of this host, waits for those of others, sends all of them the same commands, and
watches them: a rank that ends, that cannot go on, or that is silent for longer than
``--step-deadline`` ends them all, and is named.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import subprocess
import tempfile
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import zmq

from octavo.config import EngineConfig, cluster_secret
from octavo.core.plan import Float32, StepPlan, StepResult, decode, encode
from octavo.grammar.grammars import Grammars
from octavo.grammar.vocabulary import Vocabulary
from octavo.types import ConfigError, EngineDead, Progress, StepFailed, StepProfile
from octavo.wire import Wire
from octavo.worker import messages
from octavo.worker.info import PhaseClock, WorkerInfo
from octavo.worker.launch import WORKER_COMMAND, how_ended, keep, launch_ranks, node_endpoint
from octavo.worker.messages import encoder, from_worker
from octavo.worker.topology import Topology, difference

logger = logging.getLogger(__name__)

POLL_MS = 100
BEAT_SECONDS = 0.5
SILENCE = 1.5  # seconds after which a rank counts as stalled; it beats every 0.5 s
START_SECONDS = 60.0  # for a process of this host to call
NODE_SECONDS = 600.0  # for those of other hosts, which somebody starts there
NO_CALL = "has not called"
END_SECONDS = 5.0  # for a process to end once it was told to
# Ranks that fail in the same step fail in the same way; one alone leaves the others waiting.
SAME_FAULT_SECONDS = 5.0


@dataclass
class Rank:
    """What is known of one. ``process``: where it runs on this host."""

    number: int
    address: bytes = b""  # RANK/NONCE/ of the process that has called
    process: subprocess.Popen[bytes] | None = None
    hello: messages.Hello | None = None
    linked: messages.Linked | None = None
    info: WorkerInfo | None = None
    heard: float = 0.0
    beats: bool = False
    exchanges: int = 0

    def __str__(self) -> str:
        if self.hello is not None:
            return f"rank {self.number} (pid {self.hello.pid} on {self.hello.host})"
        pid = f" (pid {self.process.pid})" if self.process else ""
        return f"rank {self.number}{pid}"


@dataclass
class Answers:
    """To a question that every rank is asked."""

    wanted: int
    found: dict[int, Any] = field(default_factory=dict)

    @property
    def complete(self) -> bool:
        return len(self.found) == self.wanted


def only_tokens(result: StepResult) -> StepResult:
    """What earlier stages need to know of it."""
    return StepResult(result.step, result.tokens, result.num_accepted, np.zeros(0, dtype=np.int32))


def keep_telling(found: weakref.ref[GroupExecutor], ended: threading.Event) -> None:
    """Ranks of other hosts end when they do not hear of this process; a program may take its time
    between two calls of its LLM."""
    while not ended.wait(BEAT_SECONDS):
        if (executor := found()) is None:
            return
        executor.tell_beat()
        del executor


def release(
    owner: int,
    processes: dict[int, subprocess.Popen[bytes]],
    wire: Wire,
    context: zmq.Context[Any],
    socket: zmq.Socket[bytes],
    directory: Path | None,
    ended: threading.Event,
) -> None:
    """Ends what an executor holds that nobody has shut down. ``owner``: the process that made it; a
    fork of that has nothing to end."""
    if os.getpid() != owner:
        return
    for process in processes.values():
        process.kill()
    for process in processes.values():
        process.wait()
    ended.set()
    wire.close()
    socket.close(linger=0)
    context.destroy(linger=0)
    if directory is not None:
        shutil.rmtree(directory, ignore_errors=True)


class GrammarsElsewhere:
    """What the engine's grammars are told is also told to the rank that draws by them."""

    def __init__(self, group: GroupExecutor) -> None:
        self._group = group

    def set_vocabulary(self, vocabulary: Vocabulary) -> None:
        self._group.tell_drawing(messages.UseVocabulary(vocabulary))

    def prepare(self, text: str) -> None:
        self._group.tell_drawing(messages.Prepare(text))

    def release(self, text: str) -> None:
        self._group.tell_drawing(messages.Release(text))


class GroupExecutor:
    """``problem``: which rank has not been heard of for a while, "" where all have; may be read
    from other threads."""

    num_pending = 0

    def __init__(
        self,
        config: EngineConfig,
        grammars: Grammars,
        directory: Path | None = None,
        command: Sequence[str] = WORKER_COMMAND,
    ) -> None:
        """``grammars``: of the requests whose plans will be submitted. ``directory``: for the
        socket; None: a temporary one. ``command``: starts a worker."""
        self._config = config
        self._command = command
        self._topology = Topology.of(config)
        self.num_stages = self._topology.pipeline_size
        self._ranks = [Rank(number) for number in range(self._topology.size)]
        self._own_directory = None if directory else Path(tempfile.mkdtemp(prefix="octavo-"))
        self._directory = directory or self._own_directory
        self._context = zmq.Context()
        self._results: dict[int, StepResult | StepFailed] = {}  # by step
        self._faults: dict[int, dict[int, str]] = {}  # step -> rank -> what it raised
        self._fault_began = 0.0
        self._submitted: deque[int] = deque()  # steps in flight, oldest first
        self._since = 0.0  # when the oldest of them was first to run
        self._drawn: list[bytes] = []  # results that earlier stages have not seen
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._ended = threading.Event()
        self._lock = threading.RLock()  # of the socket
        self._answers: Answers | None = None
        self._store: messages.StoreOpen | None = None
        self._progress: Progress = lambda *news: None
        self._beat = 0.0  # when the ranks were last told that this process lives
        self._busy = self._no_time()  # seconds of each stage since the last result
        self.problem = ""
        grammars.mirror = GrammarsElsewhere(self)

    # ---- start ----

    def start(self, progress: Progress) -> WorkerInfo:
        """Starts the ranks and waits until they have loaded. Raises ConfigError for what the user
        can mend, EngineDead naming the rank that did not get there; none is left behind then."""
        clock = PhaseClock(progress)
        try:
            clock.enter("start workers")
            self._listen()
            self._launch()
            self._wait(lambda rank: bool(rank.hello or not rank.process), START_SECONDS, NO_CALL)
            self._wait(lambda rank: rank.hello is not None, NODE_SECONDS, NO_CALL)
            self._check_facts()
            self._wait_for(lambda: self._store is not None, START_SECONDS, "rank 0 opens no store")
            assert self._store is not None
            self._tell(messages.Meet(self._topology.address, self._store.port))
            met = self._start_deadline  # torch is imported meanwhile
            self._wait(lambda rank: rank.linked is not None, met, "has not joined the others")
            self._announce()
            phases = clock.finish()
            self._progress = progress
            self._wait(lambda rank: rank.info is not None and rank.beats, None, "")
            if self._own_directory is not None:  # all its sockets are connected: for good, on ipc
                shutil.rmtree(self._own_directory, ignore_errors=True)
            if self._topology.num_nodes > 1:
                arguments = (weakref.ref(self), self._ended)
                threading.Thread(target=keep_telling, args=arguments, daemon=True).start()
        except BaseException:
            self.shutdown(END_SECONDS / 5)
            raise
        return self._joint_info(phases)

    def _listen(self) -> None:
        """Raises ConfigError for an address of --master-addr and --master-port that cannot be
        had."""
        parallel = self._config.parallel
        secret = cluster_secret(parallel.cluster_secret_file)
        self._wire = Wire(self._context, secret, patient=True)
        address = f"ipc://{self._directory}/workers-{os.getpid()}"
        if parallel.nnodes > 1:
            address = node_endpoint(parallel)
        self._socket: zmq.Socket[bytes] = self._context.socket(zmq.ROUTER)
        self._socket.sndhwm = self._socket.rcvhwm = 0
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)  # a rank that connects again
        # For a user's program that forgets its LLM, or ends without closing it.
        self._finalizer = weakref.finalize(
            self, release, os.getpid(), self._processes, self._wire, self._context, self._socket,
            self._own_directory, self._ended,
        )  # fmt: skip
        self._endpoint = self._wire.bind(self._socket, address)

    def _launch(self) -> None:
        """The kernel ends the ranks with the thread that has started them: where that may end
        before this executor does, another one starts them, and stays."""
        start = partial(launch_ranks, self._config, 0, self._endpoint, self._command)
        if threading.current_thread() is threading.main_thread():
            found = start()
        else:
            started: Future[dict[int, subprocess.Popen[bytes]]] = Future()
            arguments = (start, started, self._ended)
            threading.Thread(target=keep, args=arguments, name="ranks", daemon=True).start()
            found = started.result()
        self._processes.update(found)
        for number, process in found.items():
            self._ranks[number].process = process

    def _wait(self, is_there: Callable[[Rank], bool], seconds: float | None, lack: str) -> None:
        """Until it holds for all ranks."""
        missing: list[Rank] = []

        def done() -> bool:
            missing[:] = [rank for rank in self._ranks if not is_there(rank)]
            return not missing

        try:
            self._wait_for(done, seconds, "")
        except TimeoutError:
            named = ", ".join(map(str, missing))
            have = "have" if len(missing) > 1 else "has"
            raise EngineDead(
                f"{named}: {lack.replace('has', have, 1)} within {seconds:g} s"
            ) from None

    def _wait_for(self, done: Callable[[], bool], seconds: float | None, lack: str) -> None:
        deadline = None if seconds is None else time.monotonic() + seconds
        while not done():
            self._receive(POLL_MS)
            self._check()
            if deadline is not None and time.monotonic() > deadline:
                if lack:
                    raise EngineDead(f"{lack} within {seconds:g} s")
                raise TimeoutError

    def _check_facts(self) -> None:
        """Raises ConfigError where nodes were started with different settings."""
        first, *others = [rank.hello for rank in self._ranks if rank.hello]
        for hello in others:
            if found := difference(first.facts, hello.facts):
                raise ConfigError(
                    f"rank {hello.rank} on {hello.host} was started with other settings than rank 0"
                    f" on {first.host}: {found}"
                )

    def _announce(self) -> None:
        """The self-test, as each rank has measured it."""
        for rank in self._ranks:
            hello, link = rank.hello, rank.linked
            assert hello is not None and link is not None
            logger.info(
                "rank %d on %s, %s, %s: all-reduce of 8 KiB %.0f us, of 16 MiB %.2f GB/s",
                rank.number,
                hello.host,
                link.device,
                link.transport,
                link.small_seconds * 1e6,
                link.bytes_per_second / 1e9,
            )

    def _joint_info(self, phases: dict[str, float]) -> WorkerInfo:
        infos = [rank.info for rank in self._ranks if rank.info is not None]
        first, size = infos[0], self._topology
        labels = sorted({info.device for info in infos})
        devices = labels[0] if len(labels) == 1 else ", ".join(labels)
        taken = ("import torch", "meeting")  # while this process waited for the ranks
        loaded = {k: v for k, v in first.startup_seconds.items() if k not in taken}
        return replace(
            first,
            device=f"{len(infos)} x {devices}" if len(labels) == 1 else devices,
            kv_cache_bytes=sum(info.kv_cache_bytes for info in infos),
            weight_bytes=sum(info.weight_bytes for info in infos),
            threads=sum(info.threads for info in infos),
            startup_seconds={**phases, **loaded},
            reasons={
                **first.reasons,
                "ranks": f"{len(infos)}: tensor parallel {size.tensor_size}, pipeline stages "
                f"{size.pipeline_size}; weights of "
                + ", ".join(f"{info.weight_bytes:,}" for info in infos)
                + " bytes",
            },
        )

    # ---- steps ----

    def submit(self, plan: StepPlan) -> None:
        if not self._submitted:
            self._since = time.monotonic()
        self._submitted.append(plan.step)
        self._tell(messages.Step(encode(plan), self._drawn))
        self._drawn = []

    def ready(self) -> bool:
        """Whether ``collect`` would return at once."""
        self._receive(0)
        return self._submitted[0] in self._results

    def collect(self) -> StepResult:
        """Raises EngineDead when the group cannot go on."""
        step = self._submitted[0]
        while step not in self._results:
            self._receive(POLL_MS)
            self._check()
        self._submitted.popleft()
        self._since = time.monotonic()
        outcome = self._results.pop(step)
        if isinstance(outcome, StepFailed):
            raise outcome
        if self.num_stages > 1:
            # Of what has been told by now: a stage's part may be counted with a later step.
            outcome.busy_seconds, self._busy = self._busy, self._no_time()
        return outcome

    def _no_time(self) -> Float32:
        return np.zeros(self.num_stages, dtype=np.float32)

    def idle(self) -> bool:
        """Raises EngineDead as ``collect`` does."""
        self._receive(0)
        self._check()
        if not self.num_pending or self._submitted:
            return False
        found = self._ask(messages.UseIdleMoment())
        self.num_pending = max(answer.pending for answer in found.values())
        return any(answer.more for answer in found.values())

    def start_profile(self, directory: Path) -> None:
        """Each rank's trace goes to a directory of its own in ``directory``."""
        self._raise_problem(self._ask(messages.StartProfile(str(directory))))

    def stop_profile(self) -> StepProfile:
        """Of rank 0."""
        found = self._ask(messages.StopProfile())
        self._raise_problem(found)
        profile: StepProfile = found[0].profile
        return profile

    @staticmethod
    def _raise_problem(answers: dict[int, Any]) -> None:
        for answer in answers.values():
            if answer.error:
                raise ConfigError(answer.error)

    def shutdown(self, seconds: float = END_SECONDS) -> None:
        """Ends the ranks, those that take longer than ``seconds`` by force."""
        if self._context.closed:
            return
        with contextlib.suppress(zmq.ZMQError, AttributeError):  # it may not listen yet
            self._tell(messages.Stop())
        deadline = time.monotonic() + seconds
        for rank in self._ranks:
            if rank.process is None:
                continue
            with contextlib.suppress(subprocess.TimeoutExpired):
                rank.process.wait(max(0.0, deadline - time.monotonic()))
            if rank.process.poll() is None:
                rank.process.kill()
                rank.process.wait()
        with self._lock:
            self._ended.set()
        with contextlib.suppress(AttributeError):  # it may not listen yet
            self._finalizer.detach()
            self._wire.close()
        # To other hosts the last word still has to go.
        self._context.destroy(linger=0 if self._topology.num_nodes == 1 else 1000)
        if self._own_directory is not None:
            shutil.rmtree(self._own_directory, ignore_errors=True)

    def abandon(self) -> None:
        self.shutdown(0.0)

    # ---- wire ----

    def _tell(self, message: messages.Message) -> None:
        """To all ranks that have called, in order."""
        raw = encoder.encode(message)
        with self._lock:
            for rank in self._ranks:
                if rank.hello is not None:
                    self._socket.send_multipart([rank.address, raw])

    def tell_drawing(self, message: messages.Message) -> None:
        """To the rank that draws by grammars."""
        address = self._ranks[self._topology.reporter].address
        with self._lock:
            self._socket.send_multipart([address, encoder.encode(message)])

    def _ask(self, message: messages.Message) -> dict[int, Any]:
        """Every rank's answer."""
        self._answers = Answers(len(self._ranks))
        self._tell(message)
        began, deadline = time.monotonic(), self._start_deadline  # it may be a graph to capture
        while not self._answers.complete:
            self._receive(POLL_MS)
            self._check()
            if time.monotonic() - began > deadline:
                missing = [r for r in self._ranks if r.number not in self._answers.found]
                raise EngineDead(
                    f"{', '.join(map(str, missing))}: no answer to {type(message).__name__} within "
                    f"{deadline:g} s"
                )
        return self._answers.found

    @property
    def _start_deadline(self) -> float:
        """Seconds for what takes longer than a step."""
        return max(START_SECONDS, self._config.scheduler.step_deadline)

    def _receive(self, wait_ms: int) -> None:
        """Handles all messages there are, waiting for the first one."""
        with self._lock:
            if wait_ms and not self._socket.poll(wait_ms):
                return
        while True:
            try:
                with self._lock:
                    sender, raw = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._take(sender, raw)

    def _take(self, sender: bytes, raw: bytes) -> None:
        """Of a process that is none of these, or was one of another engine's, nothing counts."""
        number, _, rest = sender.partition(b"/")
        if not number.isdigit() or int(number) >= len(self._ranks):
            return
        rank, message = self._ranks[int(number)], from_worker.decode(raw)
        address = number + b"/" + rest.partition(b"/")[0] + b"/"
        if isinstance(message, messages.Hello):
            rank.address = address
        # A node speaks for a rank that cannot any more.
        of_node = rest == b"node" and isinstance(message, messages.Broken)
        if of_node or rank.address in (b"", address):
            self._handle(rank, message)

    def _handle(self, rank: Rank, message: Any) -> None:
        rank.heard = time.monotonic()
        match message:
            case messages.Done():
                result = decode(message.result, StepResult)
                if self.num_stages > 1:
                    self._drawn.append(encode(only_tokens(result)))
                self._results[message.step] = result
            case messages.Computed():
                self._busy[rank.number // self._topology.tensor_size] += message.seconds
            case messages.Alive():
                rank.beats = True
                rank.exchanges = message.exchanges
            case messages.StepError():
                self._fault(rank, message)
            case messages.Idled() | messages.Profiled():
                if self._answers is not None:
                    self._answers.found[rank.number] = message
            case messages.Loading():
                self._progress(message.phase, message.fraction, message.num_bytes)
            case messages.Hello():
                rank.hello = message
            case messages.StoreOpen():
                self._store = message
            case messages.Linked():
                rank.linked = message
            case messages.Loaded():
                rank.info = message.info
                self.num_pending = 1  # until the ranks say how much there is
            case messages.Broken():
                if message.user_error:
                    raise ConfigError(message.message)
                raise EngineDead(f"{rank}: {message.message}")

    def _fault(self, rank: Rank, error: messages.StepError) -> None:
        """A step that raises on every rank has failed; one that raises on some has left the others
        waiting."""
        of_step = self._faults.setdefault(error.step, {})
        if not of_step:
            self._fault_began = time.monotonic()
        of_step[rank.number] = error.message
        if len(of_step) == len(self._ranks):
            del self._faults[error.step]
            self._results[error.step] = StepFailed(error.step, error.message)

    # ---- watching ----

    def tell_beat(self) -> None:
        """Where the last time is half a second ago. From any thread."""
        with self._lock:
            now = time.monotonic()
            if now - self._beat > BEAT_SECONDS and not self._ended.is_set():
                self._beat = now
                self._tell(messages.Beat())

    def _check(self) -> None:
        """Tells the ranks that this process lives. Raises EngineDead for a rank that has ended,
        that hangs, or that failed alone."""
        now = time.monotonic()
        self.tell_beat()
        for rank in self._ranks:
            if rank.process is not None and (code := rank.process.poll()) is not None:
                self._receive(0)  # it may have said why
                raise EngineDead(f"{rank} {how_ended(code)}")
        called = [rank for rank in self._ranks if rank.hello is not None]
        silent = max(called, key=lambda rank: now - rank.heard, default=None)
        silence = now - silent.heard if silent is not None else 0.0
        deadline = self._config.scheduler.step_deadline
        for step, of_step in self._faults.items():
            if now - self._fault_began > min(SAME_FAULT_SECONDS, deadline / 2):
                number, message = next(iter(of_step.items()))
                if silent is not None and silent.number not in of_step and silence > SILENCE:
                    raise EngineDead(
                        f"{silent} has not answered for {silence:.1f} s; step {step} failed on "
                        f"{self._ranks[number]}: {message}"
                    )
                raise EngineDead(f"{self._ranks[number]} failed alone in step {step}: {message}")
        has_loaded = all(rank.info is not None for rank in self._ranks)
        if silence > (deadline if has_loaded else self._start_deadline):
            raise EngineDead(f"{silent} has not answered for {silence:.1f} s (--step-deadline)")
        self.problem = ""
        if silence > SILENCE and has_loaded:
            self.problem = f"{silent} has not answered for {silence:.1f} s"
        if self._submitted and now - self._since > deadline:
            raise EngineDead(
                f"a step has taken {now - self._since:.1f} s, above --step-deadline "
                f"{deadline:g} s; {self._last()}"
            )

    def _last(self) -> str:
        """Which rank the others wait for, as far as can be told: GPUs are ahead of what they have
        done."""
        behind = min(self._ranks, key=lambda rank: rank.exchanges)
        most = max(rank.exchanges for rank in self._ranks)
        if behind.exchanges == most:
            return f"no rank is behind the others: all have begun {most} exchanges"
        return f"{behind} is the last: it has begun {behind.exchanges} of {most} exchanges"
