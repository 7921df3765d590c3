"""What the environment decides: where compiled kernels are kept, and what torch is told."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from octavo import config
from octavo.cli.main import main
from octavo.config import kernel_cache_dir, prepare_torch
from tests.fixtures.server import Server


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path / "models"))
    return tmp_path / "models"


def test_kernels_are_kept_beside_the_models(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert kernel_cache_dir() == cache / "kernels"
    prepare_torch()
    assert config.os.environ["TRITON_CACHE_DIR"] == str(cache / "kernels")
    assert not cache.exists()  # Triton makes it when there is something to keep
    monkeypatch.delenv("TRITON_CACHE_DIR")


def test_what_the_user_has_set_stays(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", "/elsewhere")
    prepare_torch()
    assert config.os.environ["TRITON_CACHE_DIR"] == "/elsewhere"
    assert kernel_cache_dir() == Path("/elsewhere")


def test_a_cache_that_cannot_be_written_is_left_to_triton(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(config.os, "access", lambda path, mode: False)
    assert kernel_cache_dir() is None
    prepare_torch()
    assert "TRITON_CACHE_DIR" not in config.os.environ


def test_collect_env_counts_the_kernels(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("a/gemv.cubin", "a/gemv.json", "b/norm.cubin"):
        file = cache / "kernels" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(b"x" * 1024)
    assert main(["collect-env", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["kernel cache"] == "2 kernels, 3.0 KiB"


def test_the_phases_of_a_start_are_metrics(server_r: Server) -> None:
    """The waterfall has the server's besides, and nearly nothing is left over."""
    page = server_r.client.get("/metrics").text
    phases = re.findall(r'octavo_startup_seconds\{.*phase="([^"]+)".*\} (\S+)', page)
    assert [name for name, _ in phases] == [
        *("engine process", "model's configuration", "import torch", "loading weights", "cache"),
        "warm-up",
    ]
    assert all(float(seconds) >= 0 for _, seconds in phases)
    shown = re.search(r"ready in (\S+) s\n((?:  .* s +█+\n)+)", server_r.log)
    assert shown, server_r.log
    lines = re.findall(r"^  (.+?) +(\S+) s +█+$", shown[2], re.M)
    assert [name for name, _ in lines] == [
        *("interpreter and imports", "finding the model", *(name for name, _ in phases)),
        *("opening the doors", "other"),
    ]
    assert float(lines[-1][1]) <= 0.05 * float(shown[1]) + 0.1
