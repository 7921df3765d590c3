"""The ``octavo`` command as a process: exit codes, one line on stderr, quick answers."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

import pytest

from octavo import __version__
from octavo.cli.main import COMMANDS, main
from tests.fixtures.waiting import PATIENCE


def octavo(*tokens: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "octavo", *tokens], capture_output=True, text=True, timeout=PATIENCE
    )


@pytest.mark.parametrize(
    "tokens",
    [
        ["serve", "/no/such/model"],
        ["serve", "--no-such-flag"],
        ["serve", "--port", "x"],
        ["serve", "--tensor-parallel-size", "0"],
        ["serve", "--nnodes", "2", "-tp", "3"],
        ["serve", "--trust-remote-code"],
        ["serve", "--no-enforce-eager=false"],
        ["serve", "-q", "qat"],
        ["serve", "--api-key", ""],
        ["serve", "--hf-overrides.a", "1", "--hf-overrides.a.b", "2"],
        ["chat", "--url", "http://127.0.0.1:port", "-q", "hi"],
        ["sreve"],
        ["chat", "--url", "http://127.0.0.1:9", "-q", "hi"],
        ["chat", "--dtype", "half", "-q", "hi"],
        ["pull", "no-such-model"],
    ],
    ids=" ".join,
)
def test_a_fault_of_the_user_is_one_line_and_exit_2(
    tokens: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(tokens) == 2
    out, err = capsys.readouterr()
    lines = [line for line in err.splitlines() if not line.startswith("octavo 0")]
    assert len(lines) == 1 and lines[0].startswith("octavo: ") and not out


def test_a_directory_that_is_no_model_is_named(tmp_path: Path) -> None:
    done = octavo("serve", str(tmp_path))
    assert done.returncode == 2
    assert str(tmp_path) in done.stderr and "Traceback" not in done.stderr


def test_what_would_steer_a_terminal_is_shown_as_it_is_spelled(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["template-check", "./no\x1b[2J\nsuch"]) == 2
    assert "model ./no\\x1b[2J\\nsuch: no such file" in capsys.readouterr().err


def test_version() -> None:
    assert octavo("--version").stdout.strip() == __version__


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "--help"]) == 0
    assert f"octavo {command}" in capsys.readouterr().out


def test_help_answers_at_once() -> None:
    """Processor time, so that a busy machine does not matter."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    for _ in range(3):
        done = octavo("--help")
        assert done.returncode == 0 and "octavo serve" in done.stdout
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    used = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
    assert used / 3 < 0.3


def test_a_closed_pipe_is_no_traceback() -> None:
    done = subprocess.run(
        f"{sys.executable} -m octavo serve --help=all | head -1",
        shell=True,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.stderr == ""
