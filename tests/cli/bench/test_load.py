"""The load client against a server of the test's own, that counts what it is sent."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from octavo.cli.bench.load import arrival_times
from octavo.cli.main import main


class FakeServer:
    """Streams ``max_tokens`` chunks of one token; fails where ``fail`` says so."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.fail = ""
        self.open = self.most_open = 0
        self.url = ""

    async def models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "fake"}]})

    async def complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        self.headers.append(dict(request.headers))
        if self.fail == "status":
            return web.json_response({"error": {"message": "no room"}}, status=429)
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await self._stream(response, body, request.path.endswith("chat/completions"))
        self.open -= 1
        return response

    async def _stream(self, response: web.StreamResponse, body: Any, is_chat: bool) -> None:
        async def send(event: Any) -> None:
            await response.write(f"data: {json.dumps(event)}\n\n".encode())

        if is_chat:
            await send({"choices": [{"delta": {"role": "assistant", "content": ""}}]})
        for i in range(body["max_tokens"]):
            if self.fail == "event" and i == 1:
                await send({"error": {"message": "engine died"}})
                return
            text = {"delta": {"content": "x"}} if is_chat else {"text": "x"}
            await send({"choices": [text]})
            await asyncio.sleep(0.002)
        if self.fail == "cut":
            return
        usage = {"prompt_tokens": 7, "completion_tokens": body["max_tokens"]}
        await send({"choices": [], "usage": usage})
        await response.write(b"data: [DONE]\n\n")


@pytest.fixture
def fake() -> Iterator[FakeServer]:
    server = FakeServer()
    loop = asyncio.new_event_loop()
    started = threading.Event()

    async def start() -> web.AppRunner:
        app = web.Application()
        app.router.add_get("/v1/models", server.models)
        app.router.add_post("/v1/completions", server.complete)
        app.router.add_post("/v1/chat/completions", server.complete)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        server.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        return runner

    def serve() -> None:
        runner = loop.run_until_complete(start())
        loop.call_soon(started.set)  # not before it runs for good, or a stop could come too early
        loop.run_forever()
        loop.run_until_complete(runner.cleanup())

    thread = threading.Thread(target=serve)
    thread.start()
    started.wait(10)
    yield server
    loop.call_soon_threadsafe(loop.stop)
    thread.join()


def bench(fake: FakeServer, tmp_path: Path, *flags: str, expect: int = 0) -> dict[str, Any]:
    file = tmp_path / "result.json"
    tokens = ["bench", "serve", "--base-url", fake.url, "--num-prompts", "6"]
    tokens += ["--random-input-len", "7", "--random-output-len", "5", "--save-detailed"]
    tokens += ["--result-dir", str(tmp_path), "--result-filename", "result.json", *flags]
    assert main(tokens) == expect
    return dict(json.loads(file.read_text()))


def test_counts_and_latencies_of_completions(fake: FakeServer, tmp_path: Path) -> None:
    result = bench(fake, tmp_path, "--ignore-eos", "--temperature", "0")
    assert result["completed"] == 6 and result["failed"] == 0
    assert result["total_input_tokens"] == 6 * 7 and result["total_output_tokens"] == 6 * 5
    assert result["model_id"] == "fake"
    for name in ("ttft", "tpot", "itl", "e2el"):
        assert 0 < result[f"mean_{name}_ms"] < 2000
    assert [len(gaps) for gaps in result["itls"]] == [4] * 6
    assert result["generated_texts"] == ["xxxxx"] * 6
    for body in fake.bodies:
        assert len(body["prompt"]) == 7 and all(isinstance(i, int) for i in body["prompt"])
        assert body["ignore_eos"] is True and body["temperature"] == 0 and body["stream"]


def test_chat_sends_texts_and_skips_the_role_chunk(fake: FakeServer, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "one", "output_tokens": 3}\n{"prompt": "two"}\n')
    flags = ("--dataset-name", "custom", "--dataset-path", str(file), "--custom-output-len", "4")
    result = bench(fake, tmp_path, "--backend", "openai-chat", *flags)
    assert sorted(result["output_lens"]) == [3, 3, 3, 4, 4, 4]
    asked = {body["messages"][0]["content"] for body in fake.bodies}
    assert asked == {"one", "two"}
    assert [len(gaps) for gaps in result["itls"]] == [n - 1 for n in result["output_lens"]]


def test_chat_without_texts_says_what_is_missing(
    fake: FakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "serve", "--base-url", fake.url, "--backend", "openai-chat"]) == 2
    assert "--tokenizer" in capsys.readouterr().err


def test_max_concurrency_is_kept(fake: FakeServer, tmp_path: Path) -> None:
    result = bench(fake, tmp_path, "--max-concurrency", "2")
    assert fake.most_open == 2 and result["max_concurrent_requests"] <= 2


@pytest.mark.parametrize(
    ("fail", "part"), [("status", "no room"), ("event", "engine died"), ("cut", "broke off")]
)
def test_a_failed_request_is_counted_and_shown(
    fake: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str], fail: str, part: str
) -> None:
    fake.fail = fail
    result = bench(fake, tmp_path, expect=1)
    assert result["failed"] == 6 and result["completed"] == 0
    error = capsys.readouterr().err
    assert part in error
    assert ("lower --request-rate" in error) == (fail == "status")


def test_keys_headers_and_extra_fields_are_sent(fake: FakeServer, tmp_path: Path) -> None:
    bench(fake, tmp_path, "--api-key", "k", "--header", "X-A=b", "--extra-body.top_k", "5")
    assert fake.headers[0]["Authorization"] == "Bearer k" and fake.headers[0]["X-A"] == "b"
    assert fake.bodies[0]["top_k"] == 5


def test_goodput_counts_requests_within_the_limits(fake: FakeServer, tmp_path: Path) -> None:
    loose = bench(fake, tmp_path, "--goodput", "ttft:60000", "e2el:60000")
    assert loose["request_goodput"] == pytest.approx(loose["request_throughput"])
    assert bench(fake, tmp_path, "--goodput", "e2el:0.001")["request_goodput"] == 0


def test_arrivals_keep_the_rate_and_their_burstiness() -> None:
    assert arrival_times(5, float("inf"), 1.0, 0) == [0.0] * 5
    poisson = arrival_times(1000, 10.0, 1.0, 0)
    even = arrival_times(1000, 10.0, 100.0, 0)
    assert poisson[-1] == pytest.approx(99.9) and even[-1] == pytest.approx(99.9)

    def spread(times: list[float]) -> float:
        gaps = [b - a for a, b in pairwise(times)]
        return max(gaps) / (sum(gaps) / len(gaps))

    assert spread(poisson) > 4 and spread(even) < 2
    assert arrival_times(50, 3.0, 1.0, 1) == arrival_times(50, 3.0, 1.0, 1)
