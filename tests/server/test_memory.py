"""Nothing that a server keeps grows with the requests it has seen."""

from __future__ import annotations

import random
import re
from pathlib import Path

import httpx

from tests.fixtures.waiting import PATIENCE
from tests.server import mock_server

REQUESTS = 1500
MOST_GROWTH = 3.0  # MB; one kilobyte kept of each request would be half of it


def memory(pid):
    """MB that the process holds by itself."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(re.search(r"RssAnon:\s+(\d+)", status)[1]) / 1024


def one(client, draw, number):
    """A request unlike all others: names, salts, errors, clients that leave."""
    name = f"{number}-{draw.random()}"
    body = {"prompt": f"say:{name}", "max_tokens": 3, "cache_salt": name, "request_id": name}
    match number % 6:
        case 0:
            body["stream"] = True
        case 1:
            body = {f"field-{name}": 1, "prompt": name}
        case 2:
            body["model"] = name
        case 3:
            client.get(f"/{name}")
            return
        case 4:
            body = {"prompt": "endless", "max_tokens": 400, "stream": True, "user": name}
            with client.stream("POST", "/v1/completions", json=body):
                return
    client.post("/v1/completions", json=body, headers={"x-request-id": name})


def test_memory_stays_as_it_is_after_thousands_of_different_requests():
    engine = {"step_seconds": 0.0005, "max_model_len": 4096}
    quiet = {"disable_uvicorn_access_log": True}
    with mock_server.start(engine, quiet) as server:
        draw = random.Random(1)
        with httpx.Client(base_url=server.url, timeout=PATIENCE) as client:
            for number in range(REQUESTS):
                one(client, draw, number)
            before = memory(server.process.pid)
            labels = len(client.get("/metrics").text.splitlines())
            for number in range(REQUESTS, 2 * REQUESTS):
                one(client, draw, number)
            assert len(client.get("/metrics").text.splitlines()) == labels
        growth = memory(server.process.pid) - before
        print(f"{before:.1f} MB, {growth:+.2f} MB")
        assert growth < MOST_GROWTH
        server.wait_idle()
