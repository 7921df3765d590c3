"""Health, disconnects, queue bounds, drain, and the death of the engine."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import threading
import time

import httpx
import pytest

from tests.fixtures.waiting import PATIENCE, until
from tests.server import mock_server

# Minutes of steps: what is over sooner was ended.
ENDLESS = {"prompt": "endless", "max_tokens": 20_000}
SLOW = {"step_seconds": 0.02, "max_model_len": 32_768, "num_blocks": 4096}


# Seconds in which a dead or stopped engine is told; without a watch only the deadline of a step,
# 30 s, would tell. Alone it takes two at most.
TOLD = 15


def health(server, path="/health"):
    return server.client.get(path).status_code


class Stream:
    """A streamed completion, read in a thread."""

    def __init__(self, server, **body):
        self.lines = []
        self.first = threading.Event()
        self.ended_at = 0.0
        self._thread = threading.Thread(target=self._read, args=(server.url, {**ENDLESS, **body}))
        self._thread.start()
        assert self.first.wait(PATIENCE)

    def _read(self, url, body):
        with (
            contextlib.suppress(httpx.HTTPError),
            httpx.stream(
                "POST", f"{url}/v1/completions", json={**body, "stream": True}, timeout=PATIENCE
            ) as answer,
        ):
            for line in answer.iter_lines():
                if line:
                    self.lines.append(line)
                    self.first.set()
        self.ended_at = time.monotonic()
        self.first.set()

    def join(self):
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive(), "the stream is still open"
        return self.lines[-1] if self.lines else ""


def wait_for(status, server, path="/health"):
    until(lambda: health(server, path) == status, f"{path} is not {status}")


def test_loading_server_answers_503_and_is_live():
    with mock_server.start(engine={"load_seconds": 1.5}, ready=False) as server:

        def answered():
            with contextlib.suppress(httpx.HTTPError):
                return health(server)

        assert until(answered) == 503
        assert health(server, "/health/live") == 200
        assert health(server, "/health/ready") == 503
        answer = server.post("/v1/completions", prompt="x")
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_unavailable")
        assert "still loading: weights 50%" in answer.json()["error"]["message"]
        told = server.client.get("/health").json()
        assert told["error"]["code"] == "engine_unavailable"
        assert (told["loading"]["phase"], told["loading"]["fraction"]) == ("weights", 0.5)
        assert told["loading"]["seconds"] >= 0
        assert health(server, "/v1/models") == 503
        assert health(server, "/metrics") == 200
        server.wait_ready()
        assert server.complete("say:x")["choices"][0]["text"] == "x"


def test_taken_port_fails_at_once_before_the_engine_starts():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with mock_server.start(server={"port": port}, ready=False) as server:
            assert server.process.wait(PATIENCE) == 2
            assert f"port {port} on 127.0.0.1: Address already in use" in server.log
            assert "--port" in server.log


def test_an_address_of_another_machine_is_the_hosts_fault():
    with mock_server.start(server={"host": "192.0.2.1"}, ready=False) as server:
        assert server.process.wait(PATIENCE) == 2
        assert "--host must be an address of this machine" in server.log


@pytest.mark.parametrize(
    "tls, says",
    [
        ({"ssl_certfile": "/no/such.pem"}, "TLS files /no/such.pem: No such file"),
        ({"ssl_keyfile": "/no/such.key"}, "--ssl-certfile"),
    ],
)
def test_unusable_tls_files_end_the_start(tls, says):
    with mock_server.start(server=tls, ready=False) as server:
        assert server.process.wait(PATIENCE) == 2
        assert says in server.log
        assert "Traceback" not in server.log


def test_body_that_never_ends_holds_up_no_shutdown_and_leaves_no_trace():
    with mock_server.start() as server:
        host, port = server.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=PATIENCE) as connection:
            connection.sendall(
                b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
                b"content-length: 100\r\n\r\n{"
            )
            time.sleep(0.2)
            server.process.send_signal(signal.SIGTERM)
            assert server.process.wait(PATIENCE) == 0
            assert connection.recv(65536).startswith(b"HTTP/1.1 503")
        assert "Traceback" not in server.log


def test_model_that_cannot_load_ends_with_its_own_line():
    with mock_server.start(engine={"fail": "weights are missing"}, ready=False) as server:
        assert server.process.wait(PATIENCE) == 2
        assert "weights are missing" in server.log
        assert "Traceback" not in server.log


def test_client_that_leaves_is_aborted_streamed_or_not():
    with mock_server.start(engine=SLOW) as server:
        host, port = server.url.removeprefix("http://").split(":")
        for stream in (True, False):
            body = json.dumps({**ENDLESS, "stream": stream}).encode()
            with socket.create_connection((host, int(port))) as connection:
                connection.sendall(
                    b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n"
                    b"content-type: application/json\r\ncontent-length: %d\r\n\r\n%b"
                    % (len(body), body)
                )
                until(lambda: server.metric("vllm:num_requests_running") == 1)
            server.wait_idle()
        assert server.metric("vllm:request_success_total", finished_reason="abort") == 2
        assert "Traceback" not in server.log


def test_many_leaving_clients_cost_nothing():
    """T38, on the mock: 100 dropped while queued or running, then one is served at once."""
    limits = {"max_num_queued_reqs": 200, "max_queue_wait": 1000.0}
    with mock_server.start(engine=SLOW, scheduler=limits) as server:
        host, port = server.url.removeprefix("http://").split(":")
        body = json.dumps(ENDLESS).encode()
        head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        open_connections = []
        for _ in range(100):
            connection = socket.create_connection((host, int(port)))
            connection.sendall(head + b"content-length: %d\r\n\r\n%b" % (len(body), body))
            open_connections.append(connection)
        until(lambda: server.metric("octavo_requests_admitted_total") == 100)
        for connection in open_connections:
            connection.close()
        server.wait_idle()
        server.complete("say:x")
        assert server.metric("octavo_requests_admitted_total") == 101
        assert server.metric("vllm:request_success_total", finished_reason="abort") == 100


def test_full_queue_is_429_with_retry_after():
    scheduler = {"max_num_queued_reqs": 1}
    with mock_server.start(engine={"max_num_seqs": 1, **SLOW}, scheduler=scheduler) as server:
        running = Stream(server)
        waiting = threading.Thread(target=Stream, args=(server,), daemon=True)
        waiting.start()
        until(lambda: server.metric("vllm:num_requests_waiting") == 1)
        for stream in (False, True):
            answer = httpx.post(f"{server.url}/v1/completions", json={**ENDLESS, "stream": stream})
            assert answer.status_code == 429
            assert int(answer.headers["retry-after"]) >= 1
            assert answer.json()["error"]["code"] == "queue_full"
        assert server.metric("octavo_requests_refused_total", status="429") == 2
        many = httpx.post(f"{server.url}/v1/completions", json={"prompt": ["x"] * 300000})
        assert many.status_code == 400
        assert server.metric("octavo_requests_admitted_total") == 2
        assert health(server) == 200
        server.process.kill()
        running.join()
        waiting.join(PATIENCE)


def test_graphs_that_idle_moments_have_yet_to_capture_are_counted_down():
    with mock_server.start(engine={"graphs": 100_000}) as server:
        seen = server.metric("octavo_graphs_pending")
        assert 0 < seen <= 100_000
        until(lambda: 0 < server.metric("octavo_graphs_pending") < seen)


def test_load_says_how_much_there_is_to_do():
    with mock_server.start(engine={**SLOW, "max_num_seqs": 2, "num_blocks": 3000}) as server:
        idle = {"num_running": 0, "num_waiting": 0, "kv_cache_usage": 0}
        assert server.load() == {
            "server_load": 0, **idle, "engines": [{"engine": 0, "serves": True, **idle}],
        }  # fmt: skip
        streams = [Stream(server) for _ in range(2)]
        third = threading.Thread(target=Stream, args=(server,), daemon=True)
        third.start()
        busy = until(lambda: (found := server.load())["num_waiting"] == 1 and found)
        assert (busy["server_load"], busy["num_running"]) == (3, 2)
        # Of the mock's blocks each sequence holds one.
        assert busy["kv_cache_usage"] == busy["engines"][0]["kv_cache_usage"] == 2 / 3000
        server.process.kill()
        for stream in streams:
            stream.join()


def test_conservation_of_requests_and_metrics_of_a_busy_server():
    with mock_server.start(engine=SLOW) as server:
        streams = [Stream(server) for _ in range(3)]
        server.complete(["say:abc", "say:de"], n=2)
        page = server.client.get("/metrics").text
        samples = {
            line.rpartition(" ")[0]: float(line.rpartition(" ")[2])
            for line in page.splitlines()
            if not line.startswith("#")
        }

        def total(name):
            return sum(value for key, value in samples.items() if key.partition("{")[0] == name)

        assert total("octavo_requests_admitted_total") == 7
        assert total("vllm:num_requests_running") == 3
        assert total("octavo_requests_admitted_total") == (
            total("vllm:request_success_total")
            + total("octavo_requests_rejected_total")
            + total("vllm:num_requests_running")
            + total("vllm:num_requests_waiting")
        )
        assert total("vllm:time_to_first_token_seconds_count") == 7
        assert total("vllm:request_generation_tokens_sum") == 4 + 4 + 3 + 3
        assert 0 < total("vllm:gpu_cache_usage_perc") == total("vllm:kv_cache_usage_perc") <= 1
        assert total("vllm:e2e_request_latency_seconds_count") == 4
        inter_token = total("vllm:inter_token_latency_seconds_count")
        assert inter_token == total("vllm:generation_tokens_total") - 7
        assert inter_token == total("vllm:time_per_output_token_seconds_count")
        reasons = {"stop", "length", "abort", "error"}
        assert all(f'finished_reason="{reason}"' in page for reason in reasons)
        server.process.kill()
        for stream in streams:
            stream.join()


def test_killed_engine_ends_streams_and_the_server():
    """T42, first half."""
    with mock_server.start(engine=SLOW) as server:
        stream = Stream(server)
        answers = []
        whole = threading.Thread(
            target=lambda: answers.append(
                httpx.post(f"{server.url}/v1/completions", json=ENDLESS, timeout=PATIENCE)
            )
        )
        whole.start()
        until(lambda: server.metric("vllm:num_requests_running") == 2)
        begin = time.monotonic()
        os.kill(server.engine_pid, signal.SIGKILL)
        last = stream.join()
        assert stream.ended_at - begin < TOLD
        assert "engine_unavailable" in last
        whole.join(PATIENCE)
        assert answers[0].status_code == 503
        assert health(server) == health(server, "/health/live") == health(server, "/ping") == 503
        assert server.post("/v1/completions", prompt="x").status_code == 503
        assert server.process.wait(PATIENCE) == 1
        assert time.monotonic() - begin > 4  # health checks have seen it
        assert "signal 9" in server.log


def test_stopped_engine_is_unhealthy_and_recovers():
    """T42, second half."""
    with mock_server.start(engine=SLOW) as server:
        stream = Stream(server)
        begin = time.monotonic()
        os.kill(server.engine_pid, signal.SIGSTOP)
        wait_for(503, server)
        assert "engine_unavailable" in stream.join()
        assert stream.ended_at - begin < TOLD
        answer = server.post("/v1/completions", prompt="x")
        assert answer.status_code == 503
        assert health(server, "/health/live") == 200
        os.kill(server.engine_pid, signal.SIGCONT)
        wait_for(200, server)
        assert server.complete("say:back")["choices"][0]["text"] == "back"
        server.wait_idle()


def test_sigterm_drains(tmp_path):
    gate = tmp_path / "gate"
    with mock_server.start(engine={**SLOW, "gate": str(gate)}) as server:
        stream = Stream(server, prompt="say:held")
        server.process.send_signal(signal.SIGTERM)
        wait_for(503, server, "/health/ready")
        assert health(server, "/health/live") == 200
        answer = server.post("/v1/completions", prompt="x")
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_unavailable")
        gate.touch()
        assert stream.join() == "data: [DONE]"
        assert server.process.wait(PATIENCE) == 0
        assert "Traceback" not in server.log


@pytest.mark.parametrize("second_signal", [False, True])
def test_drain_that_does_not_end_is_ended_with_an_error_event(second_signal):
    timeout = 10 * PATIENCE if second_signal else 0.5
    with mock_server.start(engine=SLOW, server={"drain_timeout": timeout}) as server:
        stream = Stream(server)
        server.process.send_signal(signal.SIGINT)
        if second_signal:
            wait_for(503, server, "/health/ready")  # the first one has come
            server.process.send_signal(signal.SIGINT)
        assert "engine_unavailable" in stream.join()
        assert server.process.wait(PATIENCE) == 0


def test_engine_dies_with_a_killed_server_and_a_socket_file_is_reusable(tmp_path):
    path = str(tmp_path / "s.sock")
    with mock_server.start(server={"uds": path}, ready=False) as server:
        transport = httpx.HTTPTransport(uds=path)
        server.client = httpx.Client(base_url="http://x", transport=transport)
        server.wait_ready()
    with mock_server.start(server={"uds": path}, ready=False) as server:
        server.client = httpx.Client(base_url="http://x", transport=httpx.HTTPTransport(uds=path))
        server.wait_ready()
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(PATIENCE) == 0
        assert not os.path.exists(path)


def test_a_deep_probe_draws_a_token_and_is_shared(server):
    before = server.metric("octavo_requests_admitted_total")
    answer = server.client.get("/health?deep=1")
    assert answer.status_code == 200 and 0 < answer.json()["seconds"]["0"] < PATIENCE
    assert server.metric("octavo_requests_admitted_total") == before + 1
    assert server.client.get("/health?deep=0").content == b""
    assert server.client.get("/health/ready?deep=1").status_code == 200
    server.wait_idle()


def test_facts(server):
    assert server.client.get("/version").json()["version"]
    card = server.client.get("/v1/models").json()["data"]
    assert [c["id"] for c in card] == ["mock", "alias"]
    assert card[0]["max_model_len"] == 512
    assert server.client.get("/v1/models/alias").json()["id"] == "alias"
    assert server.client.get("/v1/models/none").status_code == 404
    info = server.client.get("/server_info").json()
    assert info["engine"]["reasons"] == {"dtype": "mock"}
    assert info["engine_config"]["scheduler"]["step_deadline"] == 30.0
    assert server.client.post("/reset_prefix_cache").json() == {"success": True}
    assert server.client.post("/ping").status_code == 200
    assert server.client.get("/docs").status_code == 200
    document = server.client.get("/openapi.json").json()
    assert "CompletionRequest" in document["components"]["schemas"]
    text = json.dumps(document)
    references = {part.split('"')[0] for part in text.split("#/components/schemas/")[1:]}
    assert references <= set(document["components"]["schemas"])


def test_request_ids_on_every_response():
    """And, with JSON logs, in the lines of its request."""
    settings = {"enable_request_id_headers": True, "log_format": "json"}
    settings["enable_log_requests"] = True
    with mock_server.start(server=settings) as server:
        assert len(server.client.get("/version").headers["x-request-id"]) == 32
        for stream in (False, True):
            answer = server.client.post(
                "/v1/completions",
                json={"prompt": "say:x", "stream": stream},
                headers={"x-request-id": "mine"},
            )
            assert answer.headers["x-request-id"] == "mine"
            assert "cmpl-mine" in answer.text
        assert server.client.get("/nowhere").status_code == 404

        def found():
            lines = [json.loads(s) for s in server.log.splitlines() if s.startswith("{")]
            return lines if any(line.get("status") == 404 for line in lines) else None

        lines = until(found)
        assert all(line["time"].endswith("Z") and line["process"] == "server" for line in lines)
        access = [line for line in lines if line.get("path") == "/v1/completions"]
        assert [(line["request_id"], line["status"]) for line in access] == [("mine", 200)] * 2
        asked = [line for line in lines if line["message"].startswith("cmpl-mine: ")]
        assert [line["request_id"] for line in asked] == ["mine"] * 2
