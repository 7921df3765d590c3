"""Which build of torch ``make`` installs, by what is here and what pip would bring."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "install_torch.py"
CPU_INDEX = "https://cpu.example"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("install_torch", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def installs(
    script: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    *,
    installed: str | None = None,
    gpu: bool = False,
    cuda: list[str] | None = None,
    index: str = CPU_INDEX,
    code: int = 0,
) -> tuple[int, list[tuple[str, ...]]]:
    calls: list[tuple[str, ...]] = []

    def install(*words: str) -> int:
        calls.append(words)
        return code

    monkeypatch.setattr(script, "installed", lambda requirement: installed)
    monkeypatch.setattr(script, "has_gpu", lambda: gpu)
    monkeypatch.setattr(script, "cuda_packages", lambda requirement: cuda or [])
    monkeypatch.setattr(script, "install", install)
    return script.main("torch==2.13.0", index), calls


@pytest.mark.parametrize(
    ("facts", "calls"),
    [
        ({"installed": "2.13.0+cpu"}, []),
        ({"gpu": True, "cuda": ["nvidia-nccl"]}, [("torch==2.13.0",)]),
        ({"cuda": []}, [("torch==2.13.0",)]),
        ({"cuda": ["nvidia-nccl"]}, [("torch==2.13.0", "--index-url", CPU_INDEX)]),
        ({"cuda": ["nvidia-nccl"], "index": ""}, [("torch==2.13.0",)]),
    ],
)
def test_the_build_suits_the_machine(
    script: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    facts: dict[str, Any],
    calls: list[tuple[str, ...]],
) -> None:
    assert installs(script, monkeypatch, **facts) == (0, calls)


def test_an_index_that_does_not_answer_is_explained(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _ = installs(script, monkeypatch, cuda=["nvidia-nccl"], code=1)
    assert code == 1 and "TORCH_INDEX" in capsys.readouterr().err


def test_what_is_installed_satisfies_its_own_version(script: ModuleType) -> None:
    from importlib.metadata import version

    here = version("torch")
    assert script.installed("torch>=2.11") == here
    assert script.installed("torch==" + here.partition("+")[0]) == here
    assert script.installed("torch==1.0") is None
