"""Data parallelism over two hosts and the cable between them, with real engines."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path

import httpx
import pytest

from tests.net.hosts import Host, Link, Process, client_of, until

pytestmark = [pytest.mark.net, pytest.mark.timeout(300)]

COMMON = ("--cpu-threads", "1", "--kv-cache-memory-bytes", "64MiB", "--dtype", "float32")
PORT = "18550"


class Head:
    """A server on a host, with one replica of its own and a place for another."""

    def __init__(self, host: Host, model: Path, *flags: str) -> None:
        socket = host.directory / "http"
        self.process = host.serve(
            model, "--uds", str(socket), "-dp", "2", "-dpl", "1", "-dpa", host.address, "-dpp",
            PORT, *COMMON, *flags,
        )  # fmt: skip
        self.client = client_of(socket)
        until(self._answers, why=lambda: self.process.log)

    def _answers(self) -> bool:
        assert self.process.popen.poll() is None, self.process.log
        try:
            return self.client.get("/health").status_code == 200
        except httpx.TransportError:
            return False

    def replicas(self) -> list[dict]:
        return self.client.get("/server_info").json()["replicas"]

    def num_serving(self) -> int:
        return sum(replica["problem"] is None for replica in self.replicas())

    def wait_serving(self, num: int, seconds: float = 90.0) -> None:
        until(lambda: self.num_serving() == num, seconds, lambda: self.process.log)

    def complete(self, prompt: list[int]) -> dict:
        response = self.client.post("/v1/completions", json={**GREEDY, "prompt": prompt})
        assert response.status_code == 200, response.text
        return response.json()


GREEDY = {
    "model": "r", "max_tokens": 16, "temperature": 0, "ignore_eos": True, "return_token_ids": True
}  # fmt: skip


class Streams:
    """Long answers, read in threads of their own."""

    def __init__(self, head: Head, num: int) -> None:
        self.texts: list[str] = [""] * num
        self._threads = [
            threading.Thread(target=self._read, args=(head, i), daemon=True) for i in range(num)
        ]
        for thread in self._threads:
            thread.start()
        until(lambda: all(text.count("data:") > 2 for text in self.texts))

    def _read(self, head: Head, index: int) -> None:
        body = {**GREEDY, "prompt": [20 + index, 5, 6], "max_tokens": 1900, "stream": True}
        with head.client.stream("POST", "/v1/completions", json=body) as response:
            for part in response.iter_text():
                self.texts[index] += part

    def results(self, seconds: float) -> list[str]:
        """Of each: "done", or the message of its error event."""
        deadline = time.monotonic() + seconds
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
            assert not thread.is_alive(), f"a stream did not end within {seconds} s"
        return [self._result(text) for text in self.texts]

    @staticmethod
    def _result(text: str) -> str:
        events = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
        for event in events:
            if event != "[DONE]" and "error" in (found := json.loads(event)):
                return found["error"]["message"]
        assert events[-1] == "[DONE]", events[-1]
        return "done"


def shared_streams(head: Head, num: int) -> Streams:
    """Half of them on each replica. On a machine that is busy with other things one may have to
    be tried again: a replica may stand still for a moment, and lose what it has."""
    for _ in range(5):
        head.wait_serving(2)
        streams = Streams(head, num)
        if [replica["num_running"] for replica in head.replicas()] == [num // 2] * 2:
            return streams
        streams.results(120)
    raise AssertionError(f"no even share of the streams:\n{head.process.log}")


class Watch(threading.Thread):
    """Asks for /health again and again; ``codes``: all that it was answered."""

    def __init__(self, head: Head) -> None:
        super().__init__(daemon=True)
        self._client = client_of(head.process._log.parent / "http")
        self.codes: set[int] = set()
        self._ended = threading.Event()
        self.start()

    def run(self) -> None:
        while not self._ended.wait(0.1):
            self.codes.add(self._client.get("/health").status_code)

    def end(self) -> set[int]:
        self._ended.set()
        self.join()
        return self.codes


def join(link: Link, model: Path, *flags: str, **options) -> Process:
    return link.far.serve(
        model, "--headless", "-dpa", link.near.address, "-dpp", PORT, "--cpu-threads", "1", *flags,
        **options,
    )  # fmt: skip


def test_replica_that_is_cut_off_in_mid_stream_joins_again_when_the_link_is_back(
    link: Link, model_r: Path
) -> None:
    head = Head(link.near, model_r, "--served-model-name", "r", "--step-deadline", "4")
    node = join(link, model_r, clock_ahead=100_000)
    head.wait_serving(2)
    alone = head.complete([7, 8, 9])
    streams, watch = shared_streams(head, 6), Watch(head)
    link.cut()
    head.wait_serving(1, 30)
    results = streams.results(120)
    assert results.count("done") == 3, results
    assert sum("has not answered" in result or "cut" in result for result in results) == 3, results
    assert head.complete([7, 8, 9])["choices"] == alone["choices"]
    head.process.wait_for("its place is free", 60)
    node.wait_for("joining again", 60)

    link.mend()
    head.wait_serving(2)
    answers = [head.complete([7, 8, 9]) for _ in range(6)]
    assert all(answer["choices"] == alone["choices"] for answer in answers)
    assert watch.end() == {200}
    assert {replica["restarts"] for replica in head.replicas()} == {0}
    for answer in (alone, *answers):  # by one clock, though the node's is a day ahead
        assert -0.1 < answer["timings"]["queue_seconds"] < 60
        assert 0 < answer["timings"]["first_token_seconds"] < 60
    assert head.process.stop() == 0
    assert "Traceback" not in head.process.log + node.log


def test_short_cut_costs_streams_but_not_the_engine(link: Link, model_r: Path) -> None:
    head = Head(link.near, model_r, "--served-model-name", "r")
    node = join(link, model_r)
    head.wait_serving(2)
    before = head.replicas()[1]["pid"]
    streams = shared_streams(head, 4)
    link.cut()
    head.wait_serving(1, 30)
    time.sleep(3.0)  # beyond what ZMQ bears
    link.mend()
    head.wait_serving(2)
    assert streams.results(120).count("done") == 2
    assert head.replicas()[1]["pid"] == before, "it was not started again"

    def idle() -> bool:
        return all(r["num_running"] == r["num_waiting"] == 0 for r in head.replicas())

    until(idle)
    texts = {json.dumps(head.complete([3, 4, 5])["choices"]) for _ in range(6)}
    assert len(texts) == 1
    assert node.stop() == 0
    head.wait_serving(1)
    assert head.process.stop() == 0


def test_killed_node_is_replaced_by_another(link: Link, model_r: Path) -> None:
    head = Head(link.near, model_r, "--served-model-name", "r")
    node = join(link, model_r)
    head.wait_serving(2)
    streams = shared_streams(head, 4)
    node.kill()
    assert streams.results(120).count("done") == 2
    join(link, model_r)
    head.wait_serving(2)
    assert head.process.stop() == 0


def test_head_that_is_started_again_is_joined_again(link: Link, model_r: Path) -> None:
    head = Head(link.near, model_r, "--served-model-name", "r")
    node = join(link, model_r)
    head.wait_serving(2)
    before = head.complete([7, 8, 9])["choices"]
    head.process.kill()
    again = Head(link.near, model_r, "--served-model-name", "r")
    again.wait_serving(2)
    assert "does not know this node" in node.log
    assert all(again.complete([7, 8, 9])["choices"] == before for _ in range(4))
    assert again.process.stop() == 0


def test_node_without_the_secret_is_not_let_in(link: Link, model_r: Path) -> None:
    head = Head(link.near, model_r, "--served-model-name", "r")
    other = {"OCTAVO_CLUSTER_SECRET": "some other secret, long enough"}
    node = join(link, model_r, env=other)
    assert node.popen.wait(60) == 2
    assert "does not accept this cluster secret" in node.log
    assert head.num_serving() == 1
    refused = link.near.serve(
        model_r, "-dp", "2", "-dpl", "1", "-dpa", "0.0.0.0", "-dpp", "18650",
        env={"OCTAVO_CLUSTER_SECRET": ""},
    )  # fmt: skip
    assert refused.popen.wait(60) == 2
    assert "there is no secret to guard it" in refused.log
