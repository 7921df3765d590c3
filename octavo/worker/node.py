"""A machine that lends its devices to an engine on another (``octavo serve --node-rank 1`` …): it
starts the ranks that belong here and watches over them. Never imports torch."""

from __future__ import annotations

import contextlib
import logging
import signal
import subprocess
import time

import zmq

from octavo.config import EngineConfig, cluster_secret
from octavo.types import ConfigError
from octavo.wire import LinkError, Wire, is_loopback
from octavo.worker.group import END_SECONDS
from octavo.worker.launch import how_ended, launch_ranks, node_endpoint
from octavo.worker.messages import Broken, encoder

logger = logging.getLogger("octavo")

POLL_SECONDS = 0.1
LINGER_MS = 1000  # for a last word to go


def run_node(config: EngineConfig) -> int:
    """Until the engine ends, a rank of this machine does, or a signal comes. Returns the exit code.
    Raises ConfigError where machine 0 cannot be reached safely."""
    parallel = config.parallel
    endpoint = node_endpoint(parallel)
    if cluster_secret(parallel.cluster_secret_file) is None and not is_loopback(endpoint):
        raise ConfigError(
            f"--node-rank {parallel.node_rank}: {endpoint} is on another host, which nobody may "
            "call without the cluster's secret (--cluster-secret-file, OCTAVO_CLUSTER_SECRET)"
        )
    stopping: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: stopping.append(number))
    ranks = launch_ranks(config, parallel.node_rank, endpoint)
    logger.info("node %d: ranks %s call %s", parallel.node_rank, _named(ranks), endpoint)
    try:
        while not stopping:
            ended = {rank: p.poll() for rank, p in ranks.items() if p.poll() is not None}
            if ended:
                killed = next(((r, code) for r, code in ended.items() if code and code < 0), None)
                if killed is not None:  # the others say themselves why they end
                    rank, code = killed
                    _tell_engine(config, endpoint, rank, f"it {how_ended(code)}")
                return _outcome(ended)
            time.sleep(POLL_SECONDS)
        _tell_engine(config, endpoint, min(ranks), "its machine was told to end")
        return 0
    finally:
        _end(ranks)


def _tell_engine(config: EngineConfig, endpoint: str, rank: int, why: str) -> None:
    """In the place of a rank that cannot say it: the engine would have to wait for its silence."""
    context = zmq.Context()
    wire = Wire(context, cluster_secret(config.parallel.cluster_secret_file), patient=True)
    outbox: zmq.Socket[bytes] = context.socket(zmq.DEALER)
    outbox.setsockopt(zmq.IDENTITY, f"{rank}/node".encode())
    with contextlib.suppress(LinkError, zmq.ZMQError):  # it has gone itself
        wire.connect(outbox, endpoint)
        outbox.send(encoder.encode(Broken(why)), zmq.NOBLOCK)
    wire.close()
    context.destroy(linger=LINGER_MS)


def _outcome(ended: dict[int, int | None]) -> int:
    """Of ranks that have ended: 0 where the engine told them to."""
    for rank, code in ended.items():
        if code:
            logger.error("rank %d %s", rank, how_ended(code))
            return 2 if code == 2 else 1
    return 0


def _named(ranks: dict[int, subprocess.Popen[bytes]]) -> str:
    return ", ".join(map(str, ranks))


def _end(ranks: dict[int, subprocess.Popen[bytes]]) -> None:
    """Those that are told to end by the engine do so; the others are ended."""
    deadline = time.monotonic() + END_SECONDS
    for process in ranks.values():
        process.terminate()
    for process in ranks.values():
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
