"""What a streamed token costs the API process: CPU time per token, engine and model left out.

    python -m benchmarks.streaming [--streams 32] [--tokens 1000] [--save-as streaming]

The server runs on the tests' mock engine, which gives every stream one token per step of 20 ms.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

from benchmarks import clients
from benchmarks.report import save
from tests.server import mock_server

STEP_SECONDS = 0.02
TICKS = os.sysconf("SC_CLK_TCK")


def cpu_seconds(pid: int) -> tuple[float, float]:
    """Of a process so far: in its own code, in the kernel."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) / TICKS, int(fields[12]) / TICKS


def measure(streams: int, tokens: int) -> dict[str, float]:
    """Microseconds of CPU per token, of the API process and of the clients."""
    engine = {
        "step_seconds": STEP_SECONDS,
        "max_num_seqs": streams,
        "max_model_len": 2 * tokens,
        "num_blocks": streams * tokens,
    }
    body = {"model": "mock", "prompt": "hello", "max_tokens": tokens, "stream": True}
    with mock_server.start(engine, {"disable_uvicorn_access_log": True}) as server:
        clients.run(server.url, [{**body, "max_tokens": 20}] * streams)
        user, system = cpu_seconds(server.process.pid)
        own = time.process_time()
        _, answers = clients.run(server.url, [body] * streams)
        own = time.process_time() - own
        user, system = (b - a for a, b in zip((user, system), cpu_seconds(server.process.pid)))
    total = streams * tokens
    assert all(len(answer.events) == tokens for answer in answers)
    times = {"user": user, "system": system, "clients": own}
    return {name: round(seconds / total * 1e6, 1) for name, seconds in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=1000)
    parser.add_argument("--save-as", help="name of a file in results/")
    options = parser.parse_args()
    cost = measure(options.streams, options.tokens)
    print(f"streams={options.streams} us_per_token: {cost}")
    if options.save_as:
        save(options.save_as, {"streams": options.streams, "us_per_token": cost})


if __name__ == "__main__":
    main()
