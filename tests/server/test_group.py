"""--api-server-count 2: two API processes on one port, one engine."""

from __future__ import annotations

import json
import os
import signal
import threading

import httpx
import pytest

from octavo.server.totals import EngineTotals, Totals, summed
from tests.fixtures.waiting import PATIENCE, until
from tests.server import mock_server
from tests.server.test_lifecycle import ENDLESS, SLOW

TWO = {"api_server_count": 2}


class Client:
    """One connection, hence one of the processes."""

    def __init__(self, server, **headers):
        self.http = httpx.Client(base_url=server.url, timeout=PATIENCE, headers=headers)
        self.process = self.http.get("/server_info").json()["api_process"]

    @property
    def index(self):
        return self.process["index"]


def one_of_each(server, **headers):
    """A client of the first process and one of the second."""
    found = {}
    for _ in range(200):
        client = Client(server, **headers)
        found.setdefault(client.index, client)
        if len(found) == 2:
            return found[0], found[1]
    raise AssertionError(f"all 200 connections went to process {list(found)}")


class Stream(threading.Thread):
    def __init__(self, client, **body):
        super().__init__()
        self.lines = []
        self.error = None
        self._client, self._body = client, {**ENDLESS, **body, "stream": True}
        self.start()
        until(lambda: self.lines or self.error)

    def run(self):
        try:
            with self._client.http.stream("POST", "/v1/completions", json=self._body) as answer:
                for line in answer.iter_lines():
                    if line:
                        self.lines.append(line)
        except httpx.HTTPError as error:
            self.error = error

    def end(self):
        self.join(PATIENCE)
        assert not self.is_alive()
        return self.lines[-1]


def samples(client):
    page = client.http.get("/metrics").text
    pairs = [line.rpartition(" ") for line in page.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, _, value in pairs}


def healthy(server):
    """Of a process that is being killed, connections may still be taken, and reset."""
    try:
        return httpx.get(f"{server.url}/health").status_code == 200
    except httpx.TransportError:
        return False


def total(found, name):
    return sum(value for key, value in found.items() if key.partition("{")[0] == name)


def wait_for_counts(client, counts):
    """What the other process wrote last may be a quarter of a second old."""

    def found():
        page = samples(client)
        return {name: total(page, name) for name in counts}

    until(lambda: found() == counts, lambda: f"{counts}, but {found()}")


@pytest.fixture(scope="module")
def gate(tmp_path_factory):
    return tmp_path_factory.mktemp("group") / "gate"


@pytest.fixture(scope="module")
def engine(gate):
    return {**SLOW, "max_num_seqs": 16, "gate": str(gate)}


@pytest.fixture(scope="module")
def pair(engine):
    with mock_server.start(engine=engine, server=TWO) as server:
        yield server
        server.wait_idle()
        assert "Traceback" not in server.log


def test_each_process_gets_its_own_tokens_and_a_scrape_of_any_shows_the_sum(pair):
    first, second = one_of_each(pair)
    assert first.process["pid"] != second.process["pid"]
    assert [c.process["count"] for c in (first, second)] == [2, 2]
    texts = {}

    def ask(client, word):
        body = {"prompt": f"say:{word * 9}", "max_tokens": 30, "logprobs": 1, "n": 2}
        texts[word] = client.http.post("/v1/completions", json=body).json()["choices"]

    words = "abcdefgh"
    threads = [threading.Thread(target=ask, args=((first, second)[i % 2], w))
               for i, w in enumerate(words)]  # fmt: skip
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for word in words:
        assert [choice["text"] for choice in texts[word]] == [word * 9] * 2
    assert first.http.post("/reset_prefix_cache").json() == {"success": True}
    assert second.http.post("/reset_prefix_cache").json() == {"success": True}
    counts = {
        "octavo_requests_admitted_total": 2 * len(words),
        "vllm:request_success_total": 2 * len(words),
        "vllm:generation_tokens_total": 2 * 10 * len(words),
        "vllm:request_generation_tokens_count": 2 * len(words),
    }
    for client in (first, second):
        wait_for_counts(client, counts)
        steps = total(samples(client), "vllm:iteration_tokens_total_count")
        assert 0 < steps < 200, "the engine's steps are counted once"


def test_load_and_conservation_hold_while_both_are_busy(pair, gate):
    clients = one_of_each(pair)
    before = total(samples(clients[0]), "octavo_requests_admitted_total")
    gate.unlink(missing_ok=True)
    streams = [Stream(client, prompt="say:held") for client in clients]
    for watcher in one_of_each(pair):
        until(lambda watcher=watcher: watcher.http.get("/load").json()["num_running"] == 2)
        found = samples(watcher)
        assert total(found, "octavo_requests_admitted_total") == before + 2
        assert total(found, "octavo_requests_admitted_total") == (
            total(found, "vllm:request_success_total")
            + total(found, "octavo_requests_rejected_total")
            + total(found, "vllm:num_requests_running")
            + total(found, "vllm:num_requests_waiting")
        )
    gate.touch()
    for stream in streams:
        assert stream.end() == "data: [DONE]"


def test_a_process_that_dies_costs_only_its_own_requests_and_is_started_again(engine, gate):
    gate.unlink(missing_ok=True)
    with mock_server.start(engine=engine, server=TWO) as server:
        first, second = one_of_each(server)
        staying, dying = Stream(first, prompt="say:held"), Stream(second)
        wait_for_counts(first, {"vllm:num_requests_running": 2})
        os.kill(second.process["pid"], signal.SIGKILL)
        dying.join(PATIENCE)
        assert dying.error is not None
        until(lambda: healthy(server))
        gate.touch()
        assert staying.end() == "data: [DONE]"
        until(lambda: len(server.api_pids()) == 2 and server.api_pids()[1] != second.process["pid"])
        until(lambda: healthy(server))
        _, again = one_of_each(server)
        assert again.http.post("/v1/completions", json={"prompt": "say:x"}).status_code == 200
        server.wait_idle()
        for client in one_of_each(server):
            counts = {"octavo_requests_admitted_total": 3, "vllm:request_success_total": 3}
            wait_for_counts(client, counts)
            aborted = [v for k, v in samples(client).items() if 'finished_reason="abort"' in k]
            assert aborted == [1]
        assert "API process 1 ended with code -9" in server.log
        assert "Traceback" not in server.log


def test_sigterm_drains_both_and_leaves_no_process(engine, gate):
    gate.unlink(missing_ok=True)
    with mock_server.start(engine=engine, server=TWO) as server:
        streams = [Stream(client, prompt="say:held") for client in one_of_each(server)]
        pids = [*server.api_pids(), server.engine_pid]
        assert len(pids) == 3
        server.process.send_signal(signal.SIGTERM)
        assert not any("[DONE]" in line for stream in streams for line in stream.lines)
        gate.touch()
        assert [stream.end() for stream in streams] == ["data: [DONE]"] * 2
        assert server.process.wait(PATIENCE) == 0
        until(lambda: not [pid for pid in pids if os.path.exists(f"/proc/{pid}")])
        assert "Traceback" not in server.log


def test_a_killed_engine_ends_all():
    with mock_server.start(engine=SLOW, server=TWO) as server:
        clients = one_of_each(server)
        streams = [Stream(client) for client in clients]
        pids = server.api_pids()
        os.kill(server.engine_pid, signal.SIGKILL)
        for stream in streams:
            assert "engine_unavailable" in stream.end()
        assert [client.http.get("/health").status_code for client in clients] == [503, 503]
        assert server.process.wait(PATIENCE) == 1
        until(lambda: not [pid for pid in pids if os.path.exists(f"/proc/{pid}")])


def test_none_outlives_the_first():
    with mock_server.start(server=TWO) as server:
        pids = [*server.api_pids(), server.engine_pid]
        server.process.kill()
        server.process.wait()
        until(lambda: not [pid for pid in pids if os.path.exists(f"/proc/{pid}")])


def test_changed_keys_count_in_both(tmp_path):
    path = tmp_path / "keys"
    path.write_text("a key-a infer,admin\n")
    path.chmod(0o600)
    with mock_server.start(server={**TWO, "api_key_file": str(path)}) as server:
        clients = one_of_each(server, authorization="Bearer key-a")
        path.write_text("b key-b-new infer,admin\n")
        until(lambda: {c.http.get("/v1/models").status_code for c in clients} == {401})
        assert "key-b-new" not in server.log


def test_a_port_that_another_server_shares_is_taken():
    with mock_server.start(server=TWO) as server:
        port = int(server.url.rpartition(":")[2])
        with mock_server.start(server={**TWO, "port": port}, ready=False) as second:
            assert second.process.wait(PATIENCE) == 2
            assert "Address already in use" in second.log


def test_sums_of_totals():
    engine = EngineTotals(num_running=2, num_waiting=1, num_admitted=5,
                          num_waiting_tokens=7, queue_tokens={"admitted": 9, "started": 2},
                          ended={"stop": 2, "abort": 0},
                          histograms={"queue": ([1, 0], 0.5)})  # fmt: skip
    one = Totals(engines={0: engine})
    both = summed([one, one.after_death()])
    assert (both.num_running, both.num_waiting, both.engines[0].num_admitted) == (2, 1, 10)
    assert both.engines[0].ended == {"stop": 4, "abort": 3}
    assert both.engines[0].queue_tokens == {"admitted": 18, "started": 4, "dropped": 7}
    assert both.engines[0].num_waiting_tokens == 7
    assert both.engines[0].histograms == {"queue": ([2, 0], 1.0)}
    assert json.loads(json.dumps(engine.histograms)) == {"queue": [[1, 0], 0.5]}, "not changed"
    assert engine.ended == {"stop": 2, "abort": 0}, "not changed"


def test_a_list_longer_than_a_process_may_queue_is_taken_in_parts():
    engine, limits = {"step_seconds": 0.02, "max_num_seqs": 4}, {"max_num_queued_reqs": 4}
    with mock_server.start(engine=engine, server=TWO, scheduler=limits) as server:
        client = one_of_each(server)[1]
        running = [Stream(client, max_tokens=60) for _ in range(4)]  # all places
        until(lambda: server.metric("vllm:num_requests_running") == 4)
        answer = client.http.post("/v1/embeddings", json={"input": [[i, 7] for i in range(9)]})
        assert answer.status_code == 200, answer.text
        assert len(answer.json()["data"]) == 9
        for stream in running:
            assert "[DONE]" in stream.end()


def test_a_process_that_stands_still_is_replaced():
    with mock_server.start(engine=SLOW, server=TWO) as server:
        stuck = server.api_pids()[1]
        os.kill(stuck, signal.SIGSTOP)
        until(lambda: stuck not in server.api_pids(), "it was left as it was")
        until(lambda: len(server.api_pids()) == 2)
        assert "has stood still" in server.log
        second = one_of_each(server)[1]
        assert second.process["pid"] not in (server.process.pid, stuck)
        answer = second.http.post("/v1/completions", json={"prompt": "say:hi", "max_tokens": 9})
        assert answer.json()["choices"][0]["text"] == "hi"
