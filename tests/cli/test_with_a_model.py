"""Commands that run a model themselves: they start it, use it, and leave no process behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path

import pytest

from octavo.cli.main import main
from tests.fixtures.waiting import PATIENCE

ENGINE = ["--dtype", "float32", "--kv-cache-memory-bytes", "16MiB"]


def children() -> set[str]:
    tasks = Path("/proc/self/task").glob("*/children")
    return {pid for task in tasks for pid in task.read_text().split()}


@pytest.mark.parametrize("command", ["chat", "complete"])
def test_a_question_to_a_model_that_is_not_served(
    command: str, model_r: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = children()
    tokens = [command, str(model_r), *ENGINE, "-q", "hello", "--max-tokens", "5"]
    assert main(tokens) == 0
    assert capsys.readouterr().out.strip()
    assert children() == before


def test_a_model_that_cannot_run_gives_the_servers_line(
    model_r: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["chat", str(model_r), "--max-model-len", "100k", "-q", "x"]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("octavo: ") and "100000" in error and "2048" in error


def test_interrupting_a_start_ends_the_server_too(model_r: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "octavo", "chat", str(model_r), *ENGINE],
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A test run in the background of a script ignores interrupts, and so would this.
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
    )
    server = ""
    while not server:
        assert process.poll() is None
        server = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().strip()
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130 and "Traceback" not in error
    with pytest.raises(ProcessLookupError):
        os.kill(int(server), 0)


def test_offline_benchmarks_write_their_figures(model_r: Path, tmp_path: Path) -> None:
    common = [str(model_r), *ENGINE, "--disable-tqdm", "--output-json"]
    file = tmp_path / "throughput.json"
    sizes = ["--num-prompts", "4", "--input-len", "8", "--output-len", "6"]
    assert main(["bench", "throughput", *common, str(file), *sizes]) == 0
    figures = json.loads(file.read_text())
    assert figures["num_requests"] == 4 and figures["total_num_tokens"] == 4 * 14
    file = tmp_path / "latency.json"
    sizes = ["--batch-size", "2", "--input-len", "8", "--output-len", "4"]
    rounds = ["--num-iters", "3", "--num-iters-warmup", "1"]
    assert main(["bench", "latency", *common, str(file), *sizes, *rounds]) == 0
    figures = json.loads(file.read_text())
    assert len(figures["latencies"]) == 3 and figures["avg_latency"] > 0
    assert [t.name for t in threading.enumerate() if t.name.startswith("octavo")] == []


def test_startup_is_measured_to_the_first_token(model_r: Path, tmp_path: Path) -> None:
    file = tmp_path / "startup.json"
    tokens = ["bench", "startup", str(model_r), *ENGINE, "--num-iters", "1"]
    assert main([*tokens, "--output-json", str(file)]) == 0
    assert 0 < json.loads(file.read_text())["median"] < 120


def test_keys_of_the_environment_are_for_other_servers(
    model_r: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OCTAVO_API_KEY", "of another server")
    assert main(["complete", str(model_r), *ENGINE, "-q", "hello", "--max-tokens", "3"]) == 0
    assert capsys.readouterr().out.strip()
