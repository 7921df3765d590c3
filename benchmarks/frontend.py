"""What the API process can stream, engine and model left out: tokens per second, CPU per token.

    python -m benchmarks.frontend [--streams 256] [--tokens 600] [--step-ms 7] [--save-as frontend]

The server runs on the tests' mock engine, which gives every stream one token per step and takes
some milliseconds of its own for that. Clients, mock engine and server share the machine. A server
that falls behind sends several tokens in one event, so both are counted. With steps of 20 ms and 64
streams the server is never behind, and the CPU time is that of one event per token.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

from benchmarks import clients
from benchmarks.report import save
from tests.server import mock_server

TICKS = os.sysconf("SC_CLK_TCK")
WANTED = {"tokens_per_second": 20_000, "us_per_token": 35.0}
NOT_RUN = {
    "vLLM": "not run: its API server takes its own engine core over a private protocol, and starts "
    "no engine without a model and torch; a mock engine for it would be ours, not theirs"
}


def cpu_seconds(pid: int) -> tuple[float, float]:
    """Of a process so far: in its own code, in the kernel."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) / TICKS, int(fields[12]) / TICKS


def measure(streams: int, tokens: int, step_seconds: float, api_servers: int = 1) -> dict[str, Any]:
    engine = {
        "step_seconds": step_seconds,
        "max_num_seqs": streams,
        "max_model_len": 2 * tokens,
        "num_blocks": streams * tokens,
    }
    quiet: dict[str, Any] = {"disable_uvicorn_access_log": True, "disable_log_stats": True}
    if api_servers > 1:
        quiet["api_server_count"] = api_servers
    limits = {"max_num_queued_reqs": streams, "max_queue_wait": 1000.0}
    body = {"model": "mock", "prompt": "hello", "max_tokens": tokens, "stream": True}
    with mock_server.start(engine, quiet, limits) as server:
        pids = server.api_pids()
        clients.run(server.url, [{**body, "max_tokens": 20}] * streams)  # warm
        before = [cpu_seconds(pid) for pid in pids]
        seconds, answers = clients.run(server.url, [body] * streams)
        after = [cpu_seconds(pid) for pid in pids]
    texts = [[event["choices"][0]["text"] for event in answer.events] for answer in answers]
    total = sum(len(text) for events in texts for text in events)
    assert total == streams * tokens, f"{total} tokens came, {streams * tokens} were asked for"
    user, system = (sum(a[k] - b[k] for a, b in zip(after, before)) for k in (0, 1))
    return {
        "streams": streams,
        "tokens": tokens,
        "step_ms": step_seconds * 1e3,
        "api_processes": len(pids),
        "tokens_per_second": round(total / seconds),
        "tokens_per_event": round(total / sum(map(len, texts)), 2),
        "us_per_token": {
            "user": round(user / total * 1e6, 1),
            "system": round(system / total * 1e6, 1),
            "both": round((user + system) / total * 1e6, 1),
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=600)
    parser.add_argument("--step-ms", type=float, default=7.0)
    parser.add_argument("--api-server-count", type=int, default=1)
    parser.add_argument("--save-as", help="name of a file in results/")
    options = parser.parse_args()
    count = options.api_server_count
    full = measure(options.streams, options.tokens, options.step_ms / 1e3, count)
    calm = measure(64, 300, 0.02, count)
    holds = {
        "tokens_per_second": full["tokens_per_second"] >= WANTED["tokens_per_second"],
        "us_per_token": calm["us_per_token"]["both"] <= WANTED["us_per_token"],
    }
    found = {"full": full, "one_event_per_token": calm, "holds": holds, "peers": NOT_RUN}
    print(json.dumps(found, indent=1))
    if options.save_as:
        save(options.save_as, found)


if __name__ == "__main__":
    main()
