"""The two parts of `make test`: together they are all tests, and their sum is told."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts/run_tests.py"


@pytest.fixture
def run_tests():
    spec = importlib.util.spec_from_file_location("run_tests", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_what_one_part_leaves_out_is_the_other_part(run_tests):
    (_, together), (_, alone) = run_tests.phases(["-q"], 2)
    assert together[:2] == ["-n", "2"]
    (_, one_by_one), _ = run_tests.phases([], 1)
    assert "-n" not in one_by_one
    parts = [*one_by_one, *alone]
    assert len(parts) == len({*parts}) and len(alone) == len(run_tests.ALONE)
    tests = SCRIPT.parents[1] / "tests"
    for file in tests.rglob("test_*.py"):
        assert sum(file.is_relative_to(part) for part in parts) == 1, file


def test_what_is_named_runs_alone(run_tests):
    assert run_tests.phases(["tests/test_types.py::test_x"], 2) == [("alone", [])]


def test_the_sum_of_both_parts_is_told(run_tests, monkeypatch, capsys):
    """With a pytest that writes what it would have found."""

    def pytest_of(passed: int, failed: int, status: int):
        def run(command: list[str]) -> subprocess.CompletedProcess[str]:
            report = next(w for w in command if w.startswith("--junitxml=")).partition("=")[2]
            suite = f'<testsuite tests="{passed + failed + 1}" failures="{failed}" skipped="1"/>'
            Path(report).write_text(f"<testsuites>{suite}</testsuites>")
            return subprocess.CompletedProcess(command, status)

        return run

    for second, status, said in (
        (pytest_of(3, 0, 0), 0, "==> 15 tests: 13 passed, 2 skipped, 0 failed"),
        (pytest_of(2, 2, 1), 1, "==> 16 tests: 12 passed, 2 skipped, 2 failed"),
    ):
        runs = iter((pytest_of(10, 0, 0), second))
        monkeypatch.setattr(subprocess, "run", lambda command, runs=runs: next(runs)(command))
        monkeypatch.setattr(sys, "argv", ["run_tests.py"])
        assert run_tests.main() == status
        assert said in capsys.readouterr().out


def test_a_part_that_selects_nothing_is_no_failure_and_nothing_at_all_is(run_tests, monkeypatch):
    def nothing(command: list[str]) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, run_tests.NOTHING_RAN)

    monkeypatch.setattr(subprocess, "run", nothing)
    monkeypatch.setattr(sys, "argv", ["run_tests.py", "-k", "no such test"])
    assert run_tests.main() == run_tests.NOTHING_RAN
