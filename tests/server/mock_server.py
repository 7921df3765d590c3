"""A real server process in front of the mock engine, with a tokenizer of bytes.

As a script: ``python mock_server.py SETTINGS_JSON``. As a module: ``start(...)``.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx

from tests.fixtures.waiting import PATIENCE, until

ROOT = Path(__file__).parents[2]
MOCK_ENGINE = Path(__file__).with_name("mock_engine.py")
TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if tools %}tools: {{ tools | tojson }}\n{% endif %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def write_byte_tokenizer(
    directory: Path, bos: bool, template: str | None, marks: Sequence[str] = ()
) -> None:
    from tests.fixtures.tokenizers import byte_alphabet, tokenizer_json, write_tokenizer

    alphabet = byte_alphabet()
    vocab = {alphabet[byte]: byte for byte in range(256)}
    specials = {"<s>": 256, "</s>": 257, **{mark: 258 + i for i, mark in enumerate(marks)}}
    content = tokenizer_json(specials, vocab, [], bos="<s>" if bos else None)
    settings = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": template}
    write_tokenizer(directory, content, settings)


def said(text: str, marks: Sequence[str] = ()) -> str:
    """What a prompt has after ``say:`` for the engine to answer with ``text``."""
    for index, mark in enumerate(marks):
        text = text.replace(mark, chr(0xE + index))
    return text.replace("\n", "\x01")


class MockServer:
    def __init__(self, process: subprocess.Popen[bytes], port: int, log: Path) -> None:
        self.process = process
        self.url = f"http://127.0.0.1:{port}"
        self.client = httpx.Client(base_url=self.url, timeout=PATIENCE)
        self.log_path = log

    @property
    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    @property
    def engine_pid(self) -> int:
        task = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        children = [int(pid) for pid in task.read_text().split()]
        return next(p for p in children if b"octavo.server.member" not in _command_line(p))

    def replicas(self) -> list[dict[str, Any]]:
        """What /server_info says of each."""
        return self.client.get("/server_info").json()["replicas"]

    def api_pids(self) -> list[int]:
        """Processes that speak HTTP, the first one first."""
        task = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        children = [int(pid) for pid in task.read_text().split()]
        members = [p for p in children if b"octavo.server.member" in _command_line(p)]
        return [self.process.pid, *members]

    def post(self, path: str, **body: Any) -> httpx.Response:
        return self.client.post(path, json=body)

    def complete(self, prompt: Any, **body: Any) -> dict[str, Any]:
        answer = self.post("/v1/completions", prompt=prompt, **body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def events(self, path: str, **body: Any) -> list[dict[str, Any]]:
        """All events of a streamed answer, which must end with [DONE]."""
        answer = self.post(path, stream=True, **body)
        assert answer.status_code == 200, answer.text
        lines = [line for line in answer.text.split("\n\n") if line]
        assert lines[-1] == "data: [DONE]"
        return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]

    def metric(self, name: str, **labels: str) -> float:
        """The sum of the samples of that name and those labels."""
        found = [
            line.rpartition(" ")
            for line in self.client.get("/metrics").text.splitlines()
            if line.partition("{")[0] == name
        ]
        wanted = [f'{key}="{value}"' for key, value in labels.items()]
        return sum(float(v) for n, _, v in found if all(w in n for w in wanted))

    def wait_ready(self) -> None:
        def ready() -> bool:
            assert self.process.poll() is None, self.log
            try:
                return self.client.get("/health").status_code == 200
            except httpx.HTTPError:
                return False

        until(ready, lambda: f"ready: {self.log}")

    def load(self) -> dict[str, Any]:
        return self.client.get("/load").json()

    def wait_idle(self) -> None:
        counts = ("server_load", "num_running", "num_waiting")
        until(lambda: not any(self.load()[name] for name in counts), self.load)


def _command_line(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextlib.contextmanager
def start(
    engine: dict[str, Any] | None = None,
    server: dict[str, Any] | None = None,
    scheduler: dict[str, Any] | None = None,
    model: dict[str, Any] | None = None,
    bos: bool = True,
    template: str | None = TEMPLATE,
    ready: bool = True,
    marks: Sequence[str] = (),
    parallel: dict[str, Any] | None = None,
) -> Iterator[MockServer]:
    """``marks``: further control tokens; ``said`` has the engine say them."""
    port = (server or {}).get("port") or free_port()
    with tempfile.TemporaryDirectory() as directory:
        write_byte_tokenizer(Path(directory), bos, template, marks)
        settings = {
            "path": directory,
            "engine": {"vocab_size": 260 + len(marks), **(engine or {})},
            "server": {"port": port, **(server or {})},
            # On a slow machine the wait that is predicted would have requests refused.
            "scheduler": {"max_queue_wait": 1000.0, **(scheduler or {})},
            "model": model or {},
            "parallel": parallel or {},
        }
        log = Path(directory) / "log"
        with open(log, "wb") as out:
            process = subprocess.Popen(
                [sys.executable, __file__, json.dumps(settings)],
                stdout=out,
                stderr=out,
                env={**os.environ, "PYTHONPATH": str(ROOT)},
            )
        running = MockServer(process, port, log)
        try:
            if ready:
                running.wait_ready()
            yield running
        finally:
            running.client.close()
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
            process.wait()


class _SilentLog:
    def progress(self, phase: str, fraction: float, num_bytes: int = 0) -> None:
        print("progress", phase, fraction, flush=True)

    def enter(self, part: str) -> None:
        pass

    def ready(self, info: object, address: str) -> None:
        print("ready", address, flush=True)


def main() -> int:
    from octavo.checkpoint.locate import ModelFiles
    from octavo.config import (
        EngineConfig,
        ModelConfig,
        ParallelConfig,
        SchedulerConfig,
        ServerConfig,
    )
    from octavo.server.lifecycle import serve
    from octavo.types import ConfigError

    settings = json.loads(sys.argv[1])
    path = settings["path"]
    config = EngineConfig(
        model=ModelConfig(
            **{"model": path, "served_model_name": ["mock", "alias"], **settings["model"]}
        ),
        scheduler=SchedulerConfig(**settings["scheduler"]),
        parallel=ParallelConfig(**settings["parallel"]),
    )
    command = (sys.executable, str(MOCK_ENGINE), json.dumps(settings["engine"]))
    try:
        files = ModelFiles(Path(path), "mock", False)
        return serve(config, ServerConfig(**settings["server"]), files, _SilentLog(), command)
    except ConfigError as error:
        print(error, flush=True)
        return 2


if __name__ == "__main__":
    sys.exit(main())
