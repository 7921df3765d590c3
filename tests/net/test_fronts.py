"""Load balancers with the files of deploy/ over two `octavo serve`."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.fixtures import server as real_server
from tests.fixtures.server import free_port
from tests.fixtures.waiting import PATIENCE, until
from tests.net import fronts
from tests.net.fronts import Front
from tests.server import mock_server
from tests.server.mock_server import MockServer
from tests.server.test_lifecycle import ENDLESS, SLOW

pytestmark = [pytest.mark.net, pytest.mark.timeout(300)]
COMPLETIONS = "/v1/completions"
Start = Callable[[tuple[int, int]], AbstractContextManager[Front]]


@pytest.fixture(params=fronts.FRONTS)
def front_over(request: pytest.FixtureRequest, tmp_path: Path) -> Start:
    """Starts a front over two ports."""
    if fronts.program_of(request.param) is None:
        pytest.skip(f"{request.param} is not installed")
    return lambda ports: fronts.start(request.param, tmp_path, ports)


class Pair:
    """Two servers on the mock engine, "one" and "two" by what their answers call the model."""

    def __init__(self, directory: Path) -> None:
        self.gate = directory / "gate"
        self.ports = free_port(), free_port()
        self.servers: dict[str, MockServer] = {}
        self._stack = contextlib.ExitStack()
        self._ends: dict[str, contextlib.ExitStack] = {}

    def start(self, name: str, ready: bool = True, key: str = "", **engine: Any) -> MockServer:
        port = self.ports[name == "two"]
        end = self._ends[name] = self._stack.enter_context(contextlib.ExitStack())
        engine = {**SLOW, "max_num_seqs": 64, "gate": str(self.gate), **engine}
        model = {"served_model_name": [name]}
        self.servers[name] = end.enter_context(
            mock_server.start(
                engine, {"port": port, "api_key": [key] * bool(key)}, model=model, ready=ready
            )
        )
        return self.servers[name]

    def kill(self, name: str) -> None:
        self._ends[name].close()

    def close(self) -> None:
        self._stack.close()


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    made = Pair(tmp_path)
    try:
        yield made
    finally:
        made.close()


def ask(front: Front, prompt: str = "say:x", session: str = "") -> str:
    """Which server answered."""
    headers = {"x-session-id": session} if session else {}
    answer = front.client.post(COMPLETIONS, json={"prompt": prompt}, headers=headers)
    assert answer.status_code == 200, (answer.text, front.log)
    return answer.json()["model"]


def wait_for_both(front: Front) -> None:
    """Until requests are spread over both."""
    seen: set[str] = set()
    until(lambda: seen.add(ask(front)) or seen == {"one", "two"}, lambda: f"{seen}: {front.log}")


def test_requests_spread_and_what_belongs_together_stays_together(front_over, pair):
    for name in ("one", "two"):
        pair.start(name)
    with front_over(pair.ports) as front:
        wait_for_both(front)
        clients = [threading.Thread(target=ask, args=(front, "say:held")) for _ in range(10)]
        for client in clients:
            client.start()
        running = [s.load for s in pair.servers.values()]
        until(lambda: sum(load()["num_running"] for load in running) == 10)
        # Fewest first; Envoy compares two that it draws, and the same one may be both.
        assert min(load()["num_running"] for load in running) >= (5 if front.name == "nginx" else 1)
        pair.gate.touch()
        for client in clients:
            client.join()
        by_session = {s: {ask(front, session=f"s{s}") for _ in range(4)} for s in range(30)}
        assert all(len(servers) == 1 for servers in by_session.values())
        spread = Counter(server for (server,) in by_session.values())
        assert set(spread) == {"one", "two"} and min(spread.values()) >= 3


def test_streams_arrive_piece_by_piece_and_clients_that_leave_are_noticed(front_over, pair):
    for name in ("one", "two"):
        pair.start(name)
    with front_over(pair.ports) as front:
        wait_for_both(front)
        body = {"prompt": "say:held", "stream": True}
        with front.client.stream("POST", COMPLETIONS, json=body) as answer:
            text, lines = "", answer.iter_lines()
            while "held" not in text:  # the server says no more before the gate opens
                if line := next(lines).removeprefix("data: "):
                    text += httpx.Response(200, text=line).json()["choices"][0]["text"]
            pair.gate.touch()
            assert [line for line in lines if line][-1] == "data: [DONE]"
        with front.client.stream("POST", COMPLETIONS, json={**ENDLESS, "stream": True}) as answer:
            next(answer.iter_lines())
        for server in pair.servers.values():
            server.wait_idle()


def test_a_request_that_was_sent_nothing_goes_to_the_other_server(front_over, pair):
    """Its server is killed while it computes; what had begun to arrive breaks off instead."""
    pair.start("one", hold=True)
    pair.start("two")
    with front_over(pair.ports) as front:
        until(lambda: front.client.get("/v1/models").status_code == 200)
        answers: list[str] = []
        many = [threading.Thread(target=lambda: answers.append(ask(front))) for _ in range(6)]
        for one in many:
            one.start()
        held = pair.servers["one"]
        until(lambda: held.load()["num_running"] > 0)
        num_held = held.load()["num_running"]
        until(lambda: len(answers) == 6 - held.load()["num_running"])
        assert num_held > 0
        pair.kill("one")
        for one in many:
            one.join()
        assert answers == ["two"] * 6
        body = {**ENDLESS, "stream": True}
        with front.client.stream("POST", COMPLETIONS, json=body) as stream:
            lines = stream.iter_lines()
            next(lines)
            pair.kill("two")
            with contextlib.suppress(httpx.TransportError):
                assert not [line for line in lines if "[DONE]" in line]
        answer = front.client.post(COMPLETIONS, json={"prompt": "say:x"})
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "engine_unavailable"
        assert answer.headers["content-type"].startswith("application/json")


def test_a_server_that_loads_or_drains_gets_nothing_new(front_over, pair):
    pair.start("one", ready=False, load_seconds=1000.0)
    two = pair.start("two")
    with front_over(pair.ports) as front:
        until(lambda: front.client.get("/v1/models").status_code == 200)
        assert {ask(front) for _ in range(10)} == {"two"}
        pair.kill("one")
        pair.start("one")
        wait_for_both(front)
        streams: list[str] = []
        body = {"prompt": "say:held", "stream": True}

        def read() -> None:
            streams.append(httpx.post(front.url + COMPLETIONS, json=body, timeout=PATIENCE).text)

        readers = [threading.Thread(target=read) for _ in range(8)]
        for reader in readers:
            reader.start()
        until(lambda: sum(s.load()["num_running"] for s in pair.servers.values()) == 8)
        num_draining = two.load()["num_running"]
        two.process.send_signal(signal.SIGTERM)
        until(lambda: two.client.get("/health/ready").status_code == 503)
        assert {ask(front) for _ in range(10)} == {"one"}
        assert two.load()["num_running"] == num_draining
        pair.gate.touch()
        for reader in readers:
            reader.join()
        assert len(streams) == 8 and all(text.endswith("data: [DONE]\n\n") for text in streams)
        assert two.process.wait(PATIENCE) == 0


def test_errors_pass_through_in_octavos_form(front_over, pair):
    for name in ("one", "two"):
        pair.start(name)
    with front_over(pair.ports) as front:
        wait_for_both(front)
        wrong = front.client.post(COMPLETIONS, json={"prompt": "x", "temperatur": 1})
        assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "temperatur")
        assert front.client.get("/v1/models/none").json()["error"]["message"]
        headers = {"content-type": "application/json"}
        large = front.client.post(COMPLETIONS, content=b" " * ((32 << 20) + 1), headers=headers)
        assert (large.status_code, large.json()["error"]["code"]) == (413, "body_too_large")
        most = b'{"prompt": "say:x", "temperatur": 1' + b" " * ((32 << 20) - 40) + b"}"
        answer = front.client.post(COMPLETIONS, content=most, headers=headers)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "temperatur")
        one = front.client.get("/load")
        assert one.status_code == 404 and "its own address" in one.json()["error"]["message"]


def test_a_key_that_is_wrong_is_told_whatever_the_body_and_costs_no_server_its_place(
    front_over, pair
):
    """Servers say 401 before they read the body."""
    for name in ("one", "two"):
        pair.start(name, key="right")
    with front_over(pair.ports) as front:
        front.client.headers["authorization"] = "Bearer right"
        wait_for_both(front)
        body = b'{"prompt": "' + b"x" * (8 << 20) + b'"}'
        headers = {"content-type": "application/json", "authorization": "Bearer wrong"}
        for _ in range(20):
            answer = front.client.post(COMPLETIONS, content=body, headers=headers)
            assert answer.status_code == 401, (answer.text, front.log)
        assert {ask(front) for _ in range(40)} == {"one", "two"}


def test_real_servers_one_killed_and_back_again(front_over, model_r):
    flags = ("--dtype", "float32", "--kv-cache-memory-bytes", "16MiB", "--cpu-threads", "1")
    ports = free_port(), free_port()

    def start(name: str) -> AbstractContextManager[real_server.Server]:
        port = ports[name == "two"]
        return real_server.start(
            model_r, "--served-model-name", name, *flags, clean=False, port=port
        )

    def complete(front: Front) -> tuple[str, list[int]]:
        body = {"prompt": [0, 7, 9], "max_tokens": 8, "temperature": 0, "return_token_ids": True}
        answer = front.client.post(COMPLETIONS, json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()["model"], answer.json()["choices"][0]["token_ids"]

    def until_both(front: Front) -> None:
        seen = set()
        until(lambda: seen.add(complete(front)[0]) or len(seen) == 2, lambda: front.log)

    with start("one"), contextlib.ExitStack() as second, front_over(ports) as front:
        two = second.enter_context(start("two"))
        until_both(front)
        expected = complete(front)[1]
        os.kill(two.process.pid, signal.SIGKILL)
        assert {complete(front)[0] for _ in range(10)} == {"one"}
        second.close()
        with start("two"):
            until_both(front)
            assert complete(front)[1] == expected
