"""``octavo run-batch``: every line is answered once, whatever its neighbours and interruptions."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from octavo.cli.batch_files import BatchInput, ResumableFile, StandardOutput
from octavo.cli.connection import Connection
from octavo.cli.main import main
from octavo.cli.run_batch import Batch
from octavo.types import ConfigError
from tests.fixtures.waiting import PATIENCE
from tests.server import mock_server

ENGINE = ["--dtype", "float32", "--kv-cache-memory-bytes", "16MiB"]


def line(custom_id: Any, body: dict[str, Any], url: str = "/v1/completions", **more: Any) -> str:
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": body, **more})


def written(path: Path, *lines: str) -> str:
    path.write_text("\n".join(lines) + "\n")
    return str(path)


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(text) for text in path.read_text().splitlines()]


def run_against(url: str, source: str, target: Path, limit: int | None = None) -> Batch:
    requests = BatchInput(source)
    with contextlib.closing(ResumableFile(str(target), {"input": requests.digest})) as output:
        batch = Batch(requests, output, False)
        asyncio.run(batch.run(Connection(url), limit))
        output.finish()
    return batch


def test_each_route_and_each_fault(model_r: Path, tmp_path: Path, monkeypatch, capsys) -> None:
    """Keys of the environment guard other servers than this command's own."""
    monkeypatch.setenv("OCTAVO_API_KEY", "secret")
    chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3, "temperature": 0}
    source = written(
        tmp_path / "in.jsonl",
        line("a", {"prompt": "hello", "max_tokens": 4, "temperature": 0}),
        line("b", chat, "/v1/chat/completions"),
        "",
        line("c", {"input": "hello"}, "/v1/embeddings"),
        line("d", {"prompt": "hello", "temperature": 9}),
        "{not json",
        line("e", {"prompt": "x"}, "/v1/files"),
        line("a", {"prompt": "again"}),
        line("f", {"prompt": "x", "stream": True}),
        line("g", {"prompt": "x"}, method="GET"),
        json.dumps({"custom_id": "h", "method": "POST", "url": "/v1/completions"}),
        line("i", {"prompt": "hello", "max_tokens": 4, "temperature": 0}),
    )
    target = tmp_path / "out.jsonl"
    command = ["run-batch", "-i", source, "-o", str(target), "--model", str(model_r), *ENGINE]
    assert main(command) == 0
    answers = read(target)
    assert [a["custom_id"] for a in answers] == [
        "a", "b", "c", "d", None, "e", "a", "f", "g", "h", "i",
    ]  # fmt: skip
    codes = [a["response"] and a["response"]["status_code"] for a in answers]
    assert codes == [200, 200, 200, 400, None, None, None, None, None, None, 200]
    assert len({a["id"] for a in answers}) == len(answers)
    first, chat_answer, vector, refused = (a["response"]["body"] for a in answers[:4])
    assert first["usage"]["completion_tokens"] == 4
    assert first["choices"][0]["text"] == answers[-1]["response"]["body"]["choices"][0]["text"]
    assert chat_answer["object"] == "chat.completion"
    assert len(vector["data"][0]["embedding"]) > 0
    assert refused["error"]["param"] == "temperature"
    assert [a["error"] and a["error"]["code"] for a in answers[4:10]] == [
        "invalid_line", "invalid_url", "duplicate_custom_id", "invalid_request", "invalid_method",
        "invalid_line",
    ]  # fmt: skip
    assert answers[6]["error"]["message"].startswith("line 8: custom_id 'a' is that of line 1")
    assert all(a["response"]["request_id"] for a in answers[:4])
    assert not list(tmp_path.glob("*.partial")) and not list(tmp_path.glob("*.tmp"))
    said = capsys.readouterr().err
    assert "11 requests: 4 answered, 1 refused, 6 unreadable" in said


def test_many_more_requests_than_run_at_once_keep_their_order(tmp_path: Path) -> None:
    source = written(
        tmp_path / "in.jsonl", *(line(f"r{i}", {"prompt": f"say:answer {i}"}) for i in range(100))
    )
    settings = {"engine": {"max_num_seqs": 3}, "scheduler": {"max_num_queued_reqs": 0}}
    with mock_server.start(**settings) as server:
        batch = run_against(server.url, source, tmp_path / "out.jsonl", 8)  # some meet a 429
        assert server.metric("octavo_requests_refused_total", status="429") > 0
    assert batch.counts == {"answered": 100}
    answers = read(tmp_path / "out.jsonl")
    assert [a["custom_id"] for a in answers] == [f"r{i}" for i in range(100)]
    texts = [a["response"]["body"]["choices"][0]["text"] for a in answers]
    assert texts == [f"answer {i}"[:16] for i in range(100)]


def test_an_interrupted_run_goes_on_where_it_ended(tmp_path: Path) -> None:
    """The engine dies in the middle; the second run answers only what is missing."""
    prompts = [f"say:{'x' * 15}" for _ in range(40)]
    source = written(
        tmp_path / "in.jsonl", *(line(f"r{i}", {"prompt": p}) for i, p in enumerate(prompts))
    )
    target = tmp_path / "out.jsonl"
    partial_file = tmp_path / "out.jsonl.partial"

    async def killed_midway(server: mock_server.MockServer) -> None:
        requests = BatchInput(source)
        with contextlib.closing(ResumableFile(str(target), {"input": requests.digest})) as output:
            running = asyncio.create_task(
                Batch(requests, output, False).run(Connection(server.url), 4)
            )
            while len(output.done) < 10:
                await asyncio.sleep(0.01)
            os.kill(server.engine_pid, signal.SIGKILL)
            await running

    with mock_server.start() as server, pytest.raises(Exception, match="the model's server"):
        asyncio.run(killed_midway(server))
    assert not target.exists()
    kept = partial_file.read_bytes().splitlines(keepends=True)
    assert 10 < len(kept) < 41
    partial_file.write_bytes(b"".join(kept) + b'[39,{"custom')  # a write that was cut off
    with mock_server.start() as server:
        batch = run_against(server.url, source, target)
        assert server.metric("octavo_requests_admitted_total") == 40 - (len(kept) - 1)
    assert batch.counts.total() == 40 - (len(kept) - 1)
    assert [a["custom_id"] for a in read(target)] == [f"r{i}" for i in range(40)]
    assert not partial_file.exists()


def test_answers_of_another_run_are_not_mixed_in(tmp_path: Path) -> None:
    target = str(tmp_path / "out.jsonl")
    first = ResumableFile(target, {"input": "one"})
    with pytest.raises(ConfigError, match="being written by another run"):
        ResumableFile(target, {"input": "one"})
    first.write(1, b"{}")
    first.close()
    with pytest.raises(ConfigError, match="another input, or of another model"):
        ResumableFile(target, {"input": "two"})
    again = ResumableFile(target, {"input": "one"})
    assert again.done == {1}
    again.close()


def test_standard_streams(tmp_path: Path, monkeypatch, capsysbinary) -> None:
    text = line("a", {"prompt": "say:one"}) + "\n" + line("b", {"prompt": "say:two"})
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
    requests = BatchInput("-")
    assert requests.num_requests == 2
    with mock_server.start() as server:
        asyncio.run(Batch(requests, StandardOutput(), False).run(Connection(server.url), None))
    answers = [json.loads(raw) for raw in capsysbinary.readouterr().out.splitlines()]
    texts = {a["custom_id"]: a["response"]["body"]["choices"][0]["text"] for a in answers}
    assert texts == {"a": "one", "b": "two"}


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["-i", "x.jsonl"], "needs -i IN.jsonl and -o OUT.jsonl"),
        (["-i", "https://host/x.jsonl", "-o", "y"], "https addresses are not read"),
        (["-i", "x.jsonl", "-o", "http://host/y"], "http addresses are not read or written"),
        (["-i", "missing.jsonl", "-o", "y"], "missing.jsonl: No such file"),
        (["-i", "-", "-o", "."], "--output-file .: is a directory"),
        (["-i", "-", "-o", "y", "--port", "1"], "unknown flag --port"),
        (["-i", "-", "-o", "y", "--max-concurrency", "0"], "--max-concurrency"),
    ],
)
def test_what_cannot_be_run_is_one_line(flags, said, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"")))
    assert main(["run-batch", *flags]) == 2
    error = capsys.readouterr().err
    assert said in error and error.startswith("octavo: ") and error.count("\n") == 1


def test_an_interrupt_leaves_no_process_and_says_how_to_go_on(
    model_r: Path, tmp_path: Path
) -> None:
    body = {"prompt": "x", "max_tokens": 20, "ignore_eos": True}
    source = written(tmp_path / "in.jsonl", *(line(f"r{i}", body) for i in range(2000)))
    files = ["-i", source, "-o", str(tmp_path / "out")]
    process = subprocess.Popen(
        [sys.executable, "-m", "octavo", "run-batch", str(model_r), *files, *ENGINE],
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
    )
    kept = tmp_path / "out.partial"
    while not (kept.exists() and kept.read_bytes().count(b"\n") > 1):
        assert process.poll() is None
        time.sleep(0.05)
    server = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130 and "Traceback" not in error
    assert "the same command goes on from there" in error
    for pid in server:
        with pytest.raises(ProcessLookupError):
            os.kill(int(pid), 0)


def test_a_line_that_is_nested_without_end_costs_only_itself(tmp_path: Path) -> None:
    deep = "[" * 100_000 + "]" * 100_000
    source = written(
        tmp_path / "in.jsonl",
        deep,
        '{"custom_id": "deep", "method": "POST", "url": "/v1/completions", "body": ' + deep + "}",
        line("good", {"prompt": "say:hello"}),
    )
    with mock_server.start() as server:
        batch = run_against(server.url, source, tmp_path / "out.jsonl")
    assert batch.counts == {"unreadable": 2, "answered": 1}
    *faulty, good = read(tmp_path / "out.jsonl")
    assert {answer["error"]["code"] for answer in faulty} == {"invalid_line"}
    assert good["response"]["status_code"] == 200


def test_a_pipe_is_read_as_a_file_is(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    text = "".join(line(str(i), {}) + "\n" for i in range(3000))
    writer = threading.Thread(target=(tmp_path / "pipe").write_text, args=(text,))
    writer.start()
    with contextlib.closing(BatchInput(str(tmp_path / "pipe"))) as requests:
        writer.join()
        for _ in range(2):
            assert b"".join(raw for _, raw in requests).decode() == text


FILLS_THE_DISK = """
import contextlib, json, sys
from octavo.cli.batch_files import ResumableFile
from octavo.types import OctavoError
with contextlib.closing(ResumableFile(sys.argv[1], {})) as output:
    try:
        for number in range(100):
            output.write(number, json.dumps({"a": "x" * 1000}).encode())
    except OctavoError as error:
        print(error)
"""


def test_a_full_disk_is_told_in_one_line_and_what_was_answered_is_kept(tmp_path: Path) -> None:
    answer = json.dumps({"a": "x" * 1000}).encode()
    script, target = tmp_path / "script.py", str(tmp_path / "answers" / "out")
    (tmp_path / "answers").mkdir()
    script.write_text(FILLS_THE_DISK)
    command = f"ulimit -f 20; exec {sys.executable} {script} {target}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True)
    assert done.stdout == f"{target}.partial cannot be written: File too large\n"
    assert done.stderr == ""
    with contextlib.closing(ResumableFile(target, {})) as output:
        kept = len(output.done)
        assert 10 < kept < 25
        for i in range(kept, 30):
            output.write(i, answer)
        output.finish()
    assert len(read(Path(target))) == 30
    assert [path.name for path in (tmp_path / "answers").iterdir()] == ["out"]


def test_a_damaged_partial_file_is_told_with_the_place(tmp_path: Path) -> None:
    target = str(tmp_path / "out")
    with contextlib.closing(ResumableFile(target, {})) as output:
        output.write(1, b"{}")
    size = output.partial.stat().st_size
    with open(output.partial, "ab") as file:
        file.write(b'[2,{"a"garbage\n')
    with pytest.raises(ConfigError, match=f"damaged at byte {size}"):
        ResumableFile(target, {})
    os.truncate(output.partial, size)
    with contextlib.closing(ResumableFile(target, {})) as output:
        assert output.done == {1}
