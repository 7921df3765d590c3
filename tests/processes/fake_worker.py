"""A worker without a model, for tests of ``GroupExecutor``: answers every step with a result that
draws nothing, and misbehaves as its last argument says.

    python fake_worker.py MODE ENDPOINT RANK LOCAL PARENT_PID   < msgpack EngineConfig

MODE: "well", or of rank 1: "silent" (never calls), "leaves" (ends after it called), "refuses"
(cannot load), "fails" (raises alone in step 1), "freezes" (in step 1, which raises on the others),
"differs" (other settings). "faults": all ranks raise in step 1.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time

import msgspec
import numpy as np
import zmq

from octavo.config import EngineConfig
from octavo.core.plan import StepPlan, StepResult, decode, encode
from octavo.parent import die_with_parent
from octavo.worker import messages
from octavo.worker.info import WorkerInfo
from octavo.worker.messages import encoder, to_worker
from octavo.worker.topology import Topology, facts_of

INFO = WorkerInfo(
    "Fake", "float32", "cpu", "cpu", 320, 64, 128, 16, 32, 1000, 500, 4, 64, 1, {}, {}, {}
)


def main() -> None:
    mode, endpoint, rank, parent = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[5])
    die_with_parent(parent)
    config = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=EngineConfig)
    odd = rank == 1
    if odd and mode == "silent":
        time.sleep(600)
    context = zmq.Context()

    def socket(name: str) -> zmq.Socket[bytes]:
        found: zmq.Socket[bytes] = context.socket(zmq.DEALER)
        found.setsockopt(zmq.IDENTITY, f"{rank}/fake/{name}".encode())
        found.connect(endpoint)
        return found

    def beat() -> None:
        outbox = socket("beat")
        while True:
            outbox.send(encoder.encode(messages.Alive(7 + rank)))
            time.sleep(0.2)

    inbox = socket("")
    facts = facts_of(config)
    if odd and mode == "differs":
        facts["model.dtype"] = "'float16'"
    inbox.send(encoder.encode(messages.Hello(rank, "here", os.getpid(), facts)))
    if odd and mode == "leaves":
        time.sleep(0.3)
        os._exit(7)
    threading.Thread(target=beat, daemon=True).start()
    if rank == 0:
        inbox.send(encoder.encode(messages.StoreOpen(1)))
    reports = rank == Topology.of(config).reporter
    while True:
        command = to_worker.decode(inbox.recv())
        answers: list[messages.Message] = []
        if isinstance(command, messages.Meet):
            answers.append(messages.Linked("cpu", "none", 1e-5, 1e9))
            if odd and mode == "refuses":
                answers.append(messages.Broken("no such thing", True))
            else:
                answers.append(messages.Loaded(INFO))
        elif isinstance(command, messages.Step):
            plan = decode(command.plan, StepPlan)
            raises = mode in ("faults", "freezes") or (mode == "fails" and odd)
            if plan.step == 1 and mode == "freezes" and odd:
                os.kill(os.getpid(), signal.SIGSTOP)
            elif plan.step == 1 and raises:
                answers.append(messages.StepError(1, f"rank {rank} slipped"))
            elif reports and not (plan.step == 1 and mode == "fails"):
                none = np.zeros((plan.num_rows, 1), np.int32)
                result = StepResult(plan.step, none, none[:, 0], np.zeros(0, np.int32))
                answers.append(messages.Done(plan.step, encode(result)))
        elif isinstance(command, messages.UseIdleMoment):
            answers.append(messages.Idled(rank == 1, 3 - rank))
        elif isinstance(command, messages.Stop):
            os._exit(0)
        for answer in answers:
            inbox.send(encoder.encode(answer))


if __name__ == "__main__":
    main()
