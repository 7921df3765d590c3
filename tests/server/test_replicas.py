"""--data-parallel-size 2: two engines behind one API process and one port."""

from __future__ import annotations

import os
import signal
import threading
import time

import httpx
import pytest

from tests.fixtures.waiting import PATIENCE, until
from tests.server import mock_server
from tests.server.test_group import Stream as GroupStream
from tests.server.test_group import one_of_each
from tests.server.test_lifecycle import ENDLESS, SLOW, TOLD, Stream, health, wait_for

TWO = {"data_parallel_size": 2}


@pytest.fixture(autouse=True)
def no_gpus(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


def start(scheduler=None, server=None, ready=True, parallel=TWO, **engine):
    return mock_server.start(
        engine={**SLOW, **engine},
        parallel=parallel,
        scheduler=scheduler,
        server=server,
        ready=ready,
    )


def facts(client):
    """What /server_info says of each replica, by the API process of that client."""
    return client.http.get("/server_info").json()["replicas"]


def pids(server):
    replicas = server.replicas() if isinstance(server, mock_server.MockServer) else facts(server)
    return [replica["pid"] for replica in replicas]


def streams_of_both(server):
    """Two streams of each API process, on connections of their own."""
    clients = [client for _ in range(2) for client in one_of_each(server)]
    return [GroupStream(client, prompt="say:held") for client in clients]


def samples(server):
    http = server.client if isinstance(server, mock_server.MockServer) else server.http
    page = http.get("/metrics").text
    pairs = [line.rpartition(" ") for line in page.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, _, value in pairs}


def of_engine(found, name, engine):
    """The sum of a family's samples for one engine."""
    return sum(
        value
        for key, value in found.items()
        if key.partition("{")[0] == name and f'engine="{engine}"' in key
    )


def check_conservation(server):
    found = samples(server)
    for engine in ("0", "1"):
        assert of_engine(found, "octavo_requests_admitted_total", engine) == (
            of_engine(found, "vllm:request_success_total", engine)
            + of_engine(found, "octavo_requests_rejected_total", engine)
            + of_engine(found, "octavo_requests_retried_total", engine)
            + of_engine(found, "vllm:num_requests_running", engine)
            + of_engine(found, "vllm:num_requests_waiting", engine)
        )


@pytest.fixture(scope="module")
def pair():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
        with start() as server:
            yield server
            server.wait_idle()
            assert "Traceback" not in server.log


def test_both_serve_and_each_has_its_own_figures(pair):
    answers = {}

    def ask(word):
        body = {"prompt": f"say:{word * 9}", "max_tokens": 30, "n": 2}
        answers[word] = httpx.post(f"{pair.url}/v1/completions", json=body, timeout=PATIENCE).json()

    threads = [threading.Thread(target=ask, args=(word,)) for word in "abcdefgh"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for word in "abcdefgh":
        assert [choice["text"] for choice in answers[word]["choices"]] == [word * 9] * 2
    found = samples(pair)
    for engine in ("0", "1"):
        assert of_engine(found, "octavo_requests_admitted_total", engine) >= 4
        assert of_engine(found, "vllm:iteration_tokens_total_count", engine) > 0
        assert of_engine(found, "octavo_kv_blocks", engine) == SLOW["num_blocks"]
        assert of_engine(found, "octavo_engine_up", engine) == 1
        assert of_engine(found, "vllm:cache_config_info", engine) == 1
    for name, total in (
        ("octavo_requests_admitted_total", 16),
        ("vllm:e2e_request_latency_seconds_count", 16),
        ("vllm:request_params_n_count", 8),
        ("vllm:generation_tokens_total", 160),
    ):
        parts = [of_engine(found, name, engine) for engine in "01"]
        assert sum(parts) == total and all(parts), name
    check_conservation(pair)
    info = pair.client.get("/server_info").json()
    assert [replica["index"] for replica in info["replicas"]] == [0, 1]
    assert len({replica["pid"] for replica in info["replicas"]}) == 2
    assert info["engine"]["reasons"]["data_parallel_size"].startswith("2 replicas")
    load = pair.client.get("/load").json()
    assert load["num_running"] == 0
    assert [engine["serves"] for engine in load["engines"]] == [True, True]
    assert {engine["kv_cache_usage"] for engine in load["engines"]} == {load["kv_cache_usage"]}


def test_an_answer_that_had_sent_nothing_is_whole_although_its_replica_died():
    with start(max_num_seqs=4) as server:
        streams = [Stream(server) for _ in range(2)]
        answers = []

        def ask():
            body = {"prompt": "say:" + "x" * 100, "max_tokens": 200}
            answers.append(httpx.post(f"{server.url}/v1/completions", json=body, timeout=PATIENCE))

        asking = [threading.Thread(target=ask) for _ in range(4)]
        for thread in asking:
            thread.start()
        until(lambda: server.metric("vllm:num_requests_running") == 6)
        begin = time.monotonic()
        os.kill(pids(server)[0], signal.SIGKILL)
        until(lambda: any(stream.ended_at for stream in streams))
        assert time.monotonic() - begin < TOLD
        (lost,) = [stream for stream in streams if stream.ended_at]
        assert "engine_unavailable" in lost.join()
        assert health(server) == 200
        for thread in asking:
            thread.join()
        assert [a.json()["choices"][0]["text"] for a in answers] == ["x" * 100] * 4
        check_conservation(server)
        until(lambda: [r["problem"] for r in server.replicas()] == [None, None])
        assert [r["restarts"] for r in server.replicas()] == [1, 0]
        assert server.complete("say:x")["choices"][0]["text"] == "x"
        assert "replica 0: the engine process ended by signal 9" in server.log
        assert "replica 0 serves again" in server.log
        assert "Traceback" not in server.log


def test_a_stopped_replica_costs_only_its_own_streams():
    with start() as server:
        streams = [Stream(server) for _ in range(2)]
        stopped = pids(server)[1]
        os.kill(stopped, signal.SIGSTOP)
        until(lambda: any(stream.ended_at for stream in streams))
        assert health(server) == 200
        for i in range(3):
            assert server.complete(f"say:{i}")["choices"][0]["text"] == str(i)
        os.kill(stopped, signal.SIGCONT)
        until(lambda: server.metric("octavo_engine_up") == 2)
        assert pids(server)[1] == stopped
        assert sorted(bool(stream.ended_at) for stream in streams) == [False, True]
        check_conservation(server)
        server.process.kill()
        for stream in streams:
            stream.join()


def test_the_server_ends_when_the_last_replica_is_gone():
    with start() as server:
        stream = Stream(server)
        begin = time.monotonic()
        for pid in pids(server):
            os.kill(pid, signal.SIGKILL)
        assert "engine_unavailable" in stream.join()
        wait_for(503, server)
        assert health(server, "/health/live") == 503
        assert "no replica serves" in server.post("/v1/completions", prompt="x").text
        assert server.process.wait(PATIENCE) == 1
        assert time.monotonic() - begin > 4


def test_sigterm_drains_both_and_leaves_no_process(tmp_path):
    gate = tmp_path / "gate"
    with start(gate=str(gate)) as server:
        children = pids(server)
        streams = [Stream(server, prompt="say:held") for _ in range(4)]
        server.process.send_signal(signal.SIGTERM)
        wait_for(503, server, "/health/ready")
        gate.touch()
        assert [stream.join() for stream in streams] == ["data: [DONE]"] * 4
        assert server.process.wait(PATIENCE) == 0
        until(lambda: not [pid for pid in children if os.path.exists(f"/proc/{pid}")])
        assert "Traceback" not in server.log


def test_a_replica_that_cannot_load_ends_the_start():
    broken = {"1": {"fail": "weights are missing"}}
    with start(replicas=broken, ready=False) as server:
        assert server.process.wait(PATIENCE) == 2
        assert "replica 1: weights are missing" in server.log
        assert "Traceback" not in server.log


def test_too_few_gpus_are_told_before_anything_starts(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    with start(ready=False) as server:
        assert server.process.wait(PATIENCE) == 2
        assert "2 replicas need 2 GPUs, 1 can be seen here (3)" in server.log


def test_several_api_processes_share_the_replicas_and_see_them_come_and_go(tmp_path):
    gate = tmp_path / "gate"
    with start(server={"api_server_count": 2}, max_num_seqs=16, gate=str(gate)) as server:
        clients = one_of_each(server)
        assert [len(c.http.get("/server_info").json()["replicas"]) for c in clients] == [2, 2]
        staying = streams_of_both(server)
        killed = pids(clients[0])[0]
        os.kill(killed, signal.SIGKILL)
        until(lambda: sum(not stream.is_alive() for stream in staying) == 2)
        ended = [stream.end() for stream in staying if not stream.is_alive()]
        assert all("engine_unavailable" in line for line in ended), "one of each process"
        for client in clients:
            body = {"prompt": "say:on", "max_tokens": 9}
            assert client.http.post("/v1/completions", json=body).status_code == 200
            assert client.http.get("/health").status_code == 200
        for client in clients:
            until(lambda c=client: [r["problem"] for r in facts(c)] == [None, None])
        assert pids(clients[0])[0] != killed
        gate.touch()
        assert [stream.end() for stream in staying].count("data: [DONE]") == 2
        gate.unlink()
        running = streams_of_both(server)  # both replicas serve both processes again
        for client in clients:
            assert [replica["num_running"] for replica in facts(client)] == [1, 1]
        gate.touch()
        assert [stream.end() for stream in running] == ["data: [DONE]"] * 4
        time.sleep(0.6)  # what the other process wrote last may be a quarter of a second old
        check_conservation(server)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(PATIENCE) == 0
        assert "Traceback" not in server.log


def test_a_cancelled_stream_is_aborted_on_its_replica(pair):
    before = pair.metric("vllm:request_success_total", finished_reason="abort")
    with httpx.stream("POST", f"{pair.url}/v1/completions", json={**ENDLESS, "stream": True}) as a:
        next(a.iter_lines())
    until(lambda: pair.metric("vllm:num_requests_running") == 0)
    assert pair.metric("vllm:request_success_total", finished_reason="abort") == before + 1
    assert pair.client.post("/reset_prefix_cache").json() == {"success": True}
