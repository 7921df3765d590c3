"""The process of one worker of several: a device, its share of the model, a socket a thread.

    python -m octavo.worker.process ENDPOINT RANK LOCAL PARENT_PID   < msgpack EngineConfig

It obeys a ``GroupExecutor`` (worker/group.py), which it calls at ENDPOINT. A thread reads commands,
one beats; the main one computes. A rank that cannot go on says so and ends; the executor then ends
the others.
"""

from __future__ import annotations

import faulthandler
import logging
import math
import os
import queue
import secrets
import signal
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
import zmq

from octavo import logs
from octavo.config import EngineConfig, cluster_secret, prepare_torch
from octavo.core.plan import StepPlan, StepResult, decode, encode
from octavo.grammar.grammars import Grammars
from octavo.parent import die_with_parent
from octavo.types import ConfigError, EngineDead, StepFailed
from octavo.wire import Wire
from octavo.worker import messages
from octavo.worker.executor import CudaExecutor, failed
from octavo.worker.info import PhaseClock, WorkerInfo
from octavo.worker.messages import encoder, to_worker
from octavo.worker.topology import Topology, facts_of
from octavo.worker.tracing import Tracing

if TYPE_CHECKING:
    from octavo.parallel import World
    from octavo.worker.device import Device
    from octavo.worker.runner import Runner

logger = logging.getLogger(__name__)

BEAT_SECONDS = 0.5
LINGER_MS = 2000  # for a last word to go
SPIN_SECONDS = 20e-6  # between two looks at a GPU that is at work


class Steps(Protocol):
    """What computes plans in order. A GPU's may have several under way."""

    def take_drawn(self, results: Sequence[StepResult]) -> None:
        """What the last stage of a pipeline has drawn, for those before it."""

    def submit(self, plan: StepPlan) -> None: ...

    def ready(self) -> bool:
        """Whether ``collect`` would return at once."""

    def collect(self) -> StepResult: ...

    def idle(self) -> bool: ...

    @property
    def num_pending(self) -> int: ...

    @property
    def busy_seconds(self) -> float:
        """What the step last collected took, without waiting for others."""

    @property
    def tracing(self) -> Tracing: ...


class CpuSteps:
    """A CPU's: a plan is computed as it comes."""

    num_pending = 0

    def __init__(self, runner: Runner, nvtx: bool) -> None:
        self._runner = runner
        self._results: deque[StepResult | StepFailed] = deque()
        self.tracing = Tracing(nvtx)
        self.tracing.prepare()

    @property
    def busy_seconds(self) -> float:
        return self._runner.busy_seconds

    def take_drawn(self, results: Sequence[StepResult]) -> None:
        self._runner.take_drawn(results)

    def submit(self, plan: StepPlan) -> None:
        try:
            with self.tracing.range(plan):
                self._results.append(self._runner.execute(plan))
        except EngineDead as error:  # another rank has gone
            logger.error("step %d: %s", plan.step, error)
            self._results.append(StepFailed(plan.step, str(error)))
        except Exception as error:
            self._results.append(failed(plan, error))

    def ready(self) -> bool:
        return True

    def collect(self) -> StepResult:
        outcome = self._results.popleft()
        if isinstance(outcome, StepFailed):
            raise outcome
        return outcome

    def idle(self) -> bool:
        return False


class Reader(threading.Thread):
    """Puts the executor's commands into a queue, in order. What the compute thread need not be
    asked for is done here: grammars are compiled while steps run."""

    def __init__(self, connection: Connection, grammars: Grammars | None) -> None:
        super().__init__(name="commands", daemon=True)
        self.commands: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._connection = connection
        self._grammars = grammars
        self.heard = math.inf  # when the executor last was; for its first word there is time

    def run(self) -> None:
        try:
            self._read()
        except Exception as error:  # the thread that computes has to know
            self.commands.put(error)

    def _read(self) -> None:
        inbox = self._connection.socket("")
        inbox.send(encoder.encode(self._connection.hello()))
        while True:
            command = to_worker.decode(inbox.recv())
            self.heard = time.monotonic()
            if isinstance(command, messages.Beat):
                continue
            if isinstance(command, messages.UseVocabulary | messages.Prepare | messages.Release):
                if self._grammars is not None:
                    self._obey(self._grammars, command)
                continue
            self.commands.put(command)

    @staticmethod
    def _obey(grammars: Grammars, command: Any) -> None:
        if isinstance(command, messages.UseVocabulary):
            grammars.set_vocabulary(command.vocabulary)
        elif isinstance(command, messages.Prepare):
            grammars.prepare(command.grammar)
        else:
            grammars.release(command.grammar)


class Connection:
    """To the executor: a socket for each thread, known there as RANK/NONCE/name."""

    def __init__(self, endpoint: str, rank: int, config: EngineConfig) -> None:
        secret = cluster_secret(config.parallel.cluster_secret_file)
        self._nonce = secrets.token_hex(8)  # of this process: what a former one sent is not of it
        self._context = zmq.Context()
        self._wire = Wire(self._context, secret, patient=True)
        self._endpoint = endpoint
        self._config = config
        self.rank = rank

    def socket(self, name: str) -> zmq.Socket[bytes]:
        found: zmq.Socket[bytes] = self._context.socket(zmq.DEALER)
        found.setsockopt(zmq.IDENTITY, f"{self.rank}/{self._nonce}/{name}".encode())
        found.sndhwm = found.rcvhwm = 0
        self._wire.connect(found, self._endpoint)
        found.linger = LINGER_MS
        return found

    def hello(self) -> messages.Hello:
        facts = facts_of(self._config)
        return messages.Hello(self.rank, socket.gethostname(), os.getpid(), facts)


class Heart(threading.Thread):
    """Tells every half second that this process lives. Ends it when the executor is silent, which
    a parent's death tells on one host alone."""

    def __init__(self, connection: Connection, reader: Reader, most_silence: float) -> None:
        super().__init__(name="heartbeat", daemon=True)
        self._connection, self._reader = connection, reader
        self._most_silence = most_silence
        self.exchanges = lambda: 0

    def run(self) -> None:
        outbox = self._connection.socket("beat")
        while True:
            beat = messages.Alive(self.exchanges())
            outbox.send(encoder.encode(beat))
            time.sleep(BEAT_SECONDS)
            if time.monotonic() - self._reader.heard > self._most_silence:
                logger.error("the engine has been silent for %.0f s", self._most_silence)
                os._exit(1)


class Worker:
    """The main thread's part."""

    def __init__(self, config: EngineConfig, endpoint: str, rank: int, local: int) -> None:
        self._config = config
        self._topology = Topology.of(config)
        self.rank, self._local = rank, local
        connection = Connection(endpoint, rank, config)
        self._outbox = connection.socket("news")
        self._reports = rank == self._topology.reporter
        first = rank % self._topology.tensor_size == 0
        self._pipelined = first and self._topology.pipeline_size > 1
        self._grammars = Grammars() if self._reports else None
        self._reader = Reader(connection, self._grammars)
        # On its own host a worker ends with its parent.
        apart = not endpoint.startswith("ipc:")
        silence = max(config.scheduler.step_deadline, 5.0) if apart else math.inf
        self._heart = Heart(connection, self._reader, silence)
        self._next_step = 0
        self._unsent: deque[int] = deque()  # steps whose results are to come

    def start(self) -> None:
        """Meets the others and loads. Raises ConfigError for what the user can mend."""
        self._reader.start()
        self._heart.start()
        clock = PhaseClock(self._tell_progress)
        clock.enter("import torch")
        prepare_torch()
        from octavo import parallel
        from octavo.worker.device import choose_device

        device = choose_device(self._local, self._topology.per_node)
        if device.kind == "cuda" and self._topology.pipeline_size > 1:
            raise ConfigError(
                f"--pipeline-parallel-size {self._topology.pipeline_size}: on CPUs alone in this "
                "version; use --tensor-parallel-size on GPUs, or hide them with "
                "CUDA_VISIBLE_DEVICES="
            )
        device.enter()
        self._heart.exchanges = parallel.Exchanges.begun
        clock.enter("meeting")
        world = self._meet(device)
        phases = clock.finish()
        self._steps, info = self._load(device, world)
        phases |= info.startup_seconds
        reasons = {"device": device.reason, **info.reasons}
        info = replace(info, startup_seconds=phases, reasons=reasons)
        self._send(messages.Loaded(info))

    def _meet(self, device: Device) -> World:
        import torch

        from octavo import parallel

        store = None
        if self.rank == 0:
            store = parallel.open_store(self._topology.address)
            self._send(messages.StoreOpen(store.port))
        command = self._reader.commands.get()
        if isinstance(command, Exception):
            raise command
        if not isinstance(command, messages.Meet):
            sys.exit(0)  # another rank could not start
        on = torch.device("cuda", device.gpu.index) if device.gpu else torch.device("cpu")
        place = self._topology.place(self.rank, self._local)
        world = parallel.meet(place, command.host, command.port, on, store)
        link = parallel.measure(world, on)
        self._send(
            messages.Linked(device.label, link.transport, link.seconds_small, link.bytes_per_second)
        )
        return world

    def _load(self, device: Device, world: World) -> tuple[Steps, WorkerInfo]:
        path, nvtx = Path(self._config.model.model), self._config.nvtx
        if device.kind == "cpu":
            from octavo.worker.runner import Runner

            cpu = Runner(self._config, path, grammars=self._grammars, world=world)
            info = cpu.start(self._tell_progress)
            return CpuSteps(cpu, nvtx), info
        from octavo.worker.cuda_runner import CudaRunner

        gpu = CudaRunner(self._config, path, device, grammars=self._grammars, world=world)
        executor = CudaExecutor(gpu, nvtx, alone=False)
        return executor, executor.start(self._tell_progress)

    # ---- steps ----

    def run(self) -> None:
        """Until told to stop."""
        commands = self._reader.commands
        while True:
            if self._unsent and self._steps.ready():
                self._report()
                continue
            try:
                command = commands.get(block=not self._unsent)
            except queue.Empty:
                time.sleep(SPIN_SECONDS)
                continue
            if isinstance(command, Exception):
                raise command
            if isinstance(command, messages.Stop):
                while self._unsent:
                    self._report()
                return
            self._obey(command)

    def _obey(self, command: Any) -> None:
        if isinstance(command, messages.Step):
            plan = decode(command.plan, StepPlan)
            if plan.step != self._next_step:
                raise EngineDead(f"got step {plan.step}, not {self._next_step}: the link was cut")
            self._next_step += 1
            self._steps.take_drawn([decode(raw, StepResult) for raw in command.drawn])
            self._unsent.append(plan.step)
            self._steps.submit(plan)
        elif isinstance(command, messages.UseIdleMoment):
            while self._unsent:  # all ranks do the same: what idle moments are for has exchanges
                self._report()
            more = self._steps.idle()
            self._send(messages.Idled(more, self._steps.num_pending))
        elif isinstance(command, messages.StartProfile | messages.StopProfile):
            self._send(self._profiled(command))
        else:
            raise EngineDead(f"{type(command).__name__} came at a time when nobody asks for it")

    def _profiled(self, command: Any) -> messages.Profiled:
        tracing = self._steps.tracing
        try:
            if isinstance(command, messages.StopProfile):
                while self._unsent:
                    self._report()
                return messages.Profiled(profile=tracing.stop())
            tracing.start(Path(command.directory) / f"rank-{self.rank}")
        except ConfigError as error:
            return messages.Profiled(str(error))
        return messages.Profiled()

    def _report(self) -> None:
        step = self._unsent.popleft()
        try:
            result = self._steps.collect()
        except StepFailed as error:
            self._send(messages.StepError(step, str(error)))
        else:
            if self._pipelined:
                self._send(messages.Computed(self._steps.busy_seconds))
            if self._reports:
                self._send(messages.Done(step, encode(result)))

    # ---- telling ----

    def fail(self, error: BaseException) -> None:
        is_user_error = isinstance(error, ConfigError)
        told = is_user_error or isinstance(error, EngineDead)
        text = str(error) if told else f"{type(error).__name__}: {error}"
        self._send(messages.Broken(text, is_user_error))

    def _tell_progress(self, phase: str, fraction: float, num_bytes: int = 0) -> None:
        if self.rank == 0:
            self._send(messages.Loading(phase, fraction, num_bytes))

    def _send(self, message: messages.Message) -> None:
        self._outbox.send(encoder.encode(message))

    def close(self) -> None:
        """Sends what is queued, for at most two seconds."""
        self._outbox.close()


def main() -> int:
    endpoint, rank, local, parent = sys.argv[1:5]
    die_with_parent(int(parent))
    faulthandler.register(signal.SIGUSR1)  # the engine asks where a step hangs (engine.watchdog)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the server's to handle
    config = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=EngineConfig)
    logs.configure_process(config.log_format, f"worker {rank}", sys.stderr)
    worker = Worker(config, endpoint, int(rank), int(local))
    code = 0
    try:
        worker.start()
        worker.run()
    except Exception as error:
        code = 2 if isinstance(error, ConfigError) else 1
        if code == 1:
            logger.exception("the worker cannot go on")
        worker.fail(error)
    worker.close()
    # Other threads may wait in a collective for ranks that are gone.
    logging.shutdown()
    os._exit(code)


if __name__ == "__main__":
    main()
