"""One engine over two hosts and the cable between them; and as many real ranks as the guide has."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import httpx
import pytest

from octavo import LLM, SamplingParams
from tests.fixtures import models
from tests.fixtures.server import start
from tests.model.running import random_ids
from tests.net.hosts import Link, client_of, until

pytestmark = [pytest.mark.net, pytest.mark.timeout(400)]

PROMPT = [5, 17, 200, 33, 9, 41]
COMMON = ("--dtype", "float32", "--cpu-threads", "1", "--kv-cache-memory-bytes", "64MiB")


def expected(model: Path, count: int) -> list[int]:
    llm = LLM(str(model), dtype="float32", cpu_threads=1, kv_cache_memory_bytes=64 << 20)
    params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
    (answer,) = llm.generate([{"prompt_token_ids": PROMPT}], params, use_tqdm=False)
    llm.close()
    return list(answer.outputs[0].token_ids)


class Head:
    """An engine whose second stage is on the other host."""

    def __init__(self, link: Link, model: Path, *flags: str) -> None:
        common = (*COMMON, "-pp", "2", "--nnodes", "2", "--master-addr", link.near.address, *flags)
        self.node = link.far.serve(model, *common, "--node-rank", "1")
        socket = link.near.directory / "http"
        self.process = link.near.serve(model, *common, "--uds", str(socket))
        self.client = client_of(socket)
        until(self.healthy, 120, lambda: self.process.log + self.node.log)

    def healthy(self) -> bool:
        assert self.process.popen.poll() is None, self.process.log
        try:
            return self.client.get("/health").status_code == 200
        except httpx.TransportError:
            return False

    def ids(self, count: int) -> list[int]:
        body = {"prompt": PROMPT, "max_tokens": count, "temperature": 0, "ignore_eos": True}
        response = self.client.post("/v1/completions", json={**body, "return_token_ids": True})
        assert response.status_code == 200, response.text
        found: list[int] = response.json()["choices"][0]["token_ids"]
        return found


class Streaming(threading.Thread):
    def __init__(self, head: Head) -> None:
        super().__init__(daemon=True)
        self._client = head.client
        self.lines: list[str] = []
        self.start()
        until(lambda: len(self.lines) > 4)

    def run(self) -> None:
        body = {"prompt": PROMPT, "max_tokens": 1500, "ignore_eos": True, "stream": True}
        with self._client.stream("POST", "/v1/completions", json=body) as response:
            self.lines += [line for line in response.iter_lines() if self._keep(line)]

    def _keep(self, line: str) -> bool:
        if line:
            self.lines.append(line)
        return False


def test_a_pipeline_over_the_link_that_is_cut_for_a_moment_and_for_good(link: Link) -> None:
    model = models.path("R")
    head = Head(link, model, "--step-deadline", "8")
    assert head.ids(24) == expected(model, 24)
    assert "rank 1 on" in head.process.log and "all-reduce of 8 KiB" in head.process.log
    stream = Streaming(head)
    link.cut()
    until(lambda: not head.healthy(), 30, lambda: head.process.log)
    stream.join(30)
    assert "rank 1" in stream.lines[-1] and "error" in stream.lines[-1]
    link.mend()
    until(head.healthy, 30, lambda: head.process.log)
    assert head.ids(24) == expected(model, 24)
    stream = Streaming(head)
    link.cut()
    assert head.process.popen.wait(60) == 1
    assert "rank 1" in head.process.log
    assert head.node.popen.wait(60) == 1


def test_both_hosts_end_together_and_wrong_settings_are_told(link: Link) -> None:
    head = Head(link, models.path("R"))
    assert head.process.stop() == 0
    assert head.node.popen.wait(40) == 0, head.node.log
    other = link.far.serve(
        models.path("R"), *COMMON, "-pp", "2", "--nnodes", "2", "--node-rank", "1",
        "--master-addr", link.near.address, "--max-model-len", "64",
    )  # fmt: skip
    again = link.near.serve(
        models.path("R"), *COMMON, "-pp", "2", "--nnodes", "2",
        "--master-addr", link.near.address, "--uds", str(link.near.directory / "http2"),
    )  # fmt: skip
    assert again.popen.wait(60) == 2
    assert "max_model_len is 64" in again.log
    other.kill()


@pytest.mark.parametrize("flags", [["-tp", "4"], ["-tp", "4", "-pp", "2"]], ids=" ".join)
def test_the_guides_commands_by_as_many_processes(flags: list[str]) -> None:
    model = models.path("R")
    with start(model, *COMMON, *flags) as server:
        answer = server.complete(PROMPT, max_tokens=24, ignore_eos=True)
    assert answer["choices"][0]["token_ids"] == expected(model, 24)


@pytest.mark.parametrize("size", [2, 3])
def test_the_demo_models_odd_heads(size: int) -> None:
    """9 heads and 3 of keys: a head of keys each, or two and one."""
    settings: dict[str, Any] = {"dtype": "float32", "max_model_len": 256, "cpu_threads": 1}
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    prompts = [{"prompt_token_ids": random_ids(40, 40_000)}, "The capital of France is"]
    found = []
    for tp in (1, size):
        llm = LLM(str(models.path("G-bf16")), **settings, tensor_parallel_size=tp)
        answers = llm.generate(prompts, params, use_tqdm=False)
        found.append([answer.outputs[0].token_ids for answer in answers])
        llm.close()
    assert found[0] == found[1]
