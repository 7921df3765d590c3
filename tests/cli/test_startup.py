"""What a user reads while a server starts: phases, the waterfall, the effective configuration."""

from __future__ import annotations

import io
import json
import shlex
from typing import Any

import pytest

from octavo.cli.console import CountLine, PhaseLine, size, table
from octavo.cli.startup import StartupLog, curl, startup_phases, waterfall
from octavo.engine.messages import EngineInfo
from octavo.machine import process_age

INFO: dict[str, Any] = {
    "model": "m",
    "architecture": "LlamaForCausalLM",
    "dtype": "bfloat16",
    "device": "cpu",
    "threads": 2,
    "vocab_size": 320,
    "max_model_len": 8192,
    "eos_ids": [1],
    "block_size": 16,
    "num_blocks": 100,
    "kv_cache_bytes": 1 << 20,
    "weight_bytes": 3 << 20,
    "max_num_seqs": 128,
    "max_num_batched_tokens": 2048,
    "implementations": {"linear": "onednn"},
    "startup_seconds": {"load": 1.0, "warm-up": 0.5},
    "reasons": {
        "block_size": "default on a CPU",
        "odd": "why",
        "quantization": "int8: --quantization int8: weights",
    },
}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_waterfall_adds_up_and_steps_to_the_right() -> None:
    parts = {"interpreter and imports": 0.5, "engine": 3.4, "opening the doors": 0.25}
    phases = startup_phases(parts, {"load": 2.0, "warm-up": 1.0}, 4.0)
    assert phases == {
        "interpreter and imports": 0.5, "load": 2.0, "warm-up": 1.0, "opening the doors": 0.25,
        "other": 0.25,
    }  # fmt: skip
    lines = waterfall({"imports": 1.0, "load": 2.0, "warm-up": 1.0}, 4.0)
    assert [line.split(" s  ")[0].split()[-1] for line in lines] == ["1.00", "2.00", "1.00"]
    starts = [line.index("█") for line in lines]
    assert starts == sorted(starts) and len(set(starts)) == 3


def test_ready_shows_configuration_reasons_and_address() -> None:
    stream = io.StringIO()
    log = StartupLog("m", stream)
    log.progress("loading weights", 0.5)
    log.ready(EngineInfo(**INFO), "http://127.0.0.1:8000")
    text = stream.getvalue()
    for part in (
        *("loading weights", "ready in", "LlamaForCausalLM", "bfloat16", "8,192 tokens"),
        *("default on a CPU", "1,600 tokens", "op linear", "onednn", "why"),
        "listening on http://127.0.0.1:8000",
    ):
        assert part in text, part
    [kept] = [line.split() for line in text.splitlines() if "quantization" in line]
    assert kept == ["quantization", "int8", "--quantization", "int8:", "weights"]


def test_the_curl_line_is_a_request() -> None:
    words = shlex.split(curl("http://h:1", "m"))
    assert words[2] == "http://h:1/v1/chat/completions"
    assert json.loads(words[-1])["model"] == "m"
    assert "--unix-socket /s" in curl("unix:/s", "m")


def test_a_long_phase_tells_bytes_and_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octavo.cli.console.time.monotonic", iter([0.0, 4.0, 20.0]).__next__)
    terminal = Terminal()
    line = PhaseLine(terminal)
    for fraction in (0.0, 0.5):
        line("loading weights", fraction, 3 << 30)
    line.end()
    text = terminal.getvalue()
    assert "░ 50%, 1.5 GiB of 3.0 GiB, 4 s" in text
    assert text.endswith("loading weights 3.0 GiB in 20.0 s\n")
    log = io.StringIO()
    monkeypatch.setattr("octavo.cli.console.time.monotonic", iter([0.0, 4.0, 11.0, 20.0]).__next__)
    line = PhaseLine(log)
    for fraction in (0.0, 0.2, 0.5):
        line("loading weights", fraction, 3 << 30)
    line.end()
    expected = ["  loading weights …", "  loading weights 50%, 1.5 GiB of 3.0 GiB, 11 s"]
    assert log.getvalue().splitlines() == expected


def test_phases_are_lines_in_a_log_and_one_line_on_a_terminal() -> None:
    log, terminal = io.StringIO(), Terminal()
    for stream in (log, terminal):
        line = PhaseLine(stream)
        for phase, fraction in (("a", 0.1), ("a", 0.2), ("b", -1.0), ("b", 1.0)):
            line(phase, fraction)
        line.end()
        line.end()
        assert list(line.seconds) == ["a", "b"]
    assert log.getvalue().splitlines() == ["  a …", "  b …"]
    assert terminal.getvalue().count("\n") == 2


def test_a_count_ends_its_line_when_all_is_done() -> None:
    terminal = Terminal()
    line = CountLine(3, "requests", terminal)
    for done in (1, 2, 3):
        line.show(done)
    assert "3/3 requests" in terminal.getvalue() and terminal.getvalue().endswith("\n")


def test_sizes_and_tables() -> None:
    assert size(100) == "100 B" and size(1536) == "1.5 KiB" and size(5 << 30) == "5.0 GiB"
    assert table([("a", "b"), ("long", "c")], indent="") == "a     b\nlong  c"
    assert table([]) == ""


def test_the_age_of_the_process_is_positive() -> None:
    assert 0 < process_age() < 100_000
