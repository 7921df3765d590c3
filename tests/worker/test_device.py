"""The device is the first GPU that is shown and recent enough, else the CPU; and why."""

from __future__ import annotations

import logging

import pytest
import torch

from octavo.types import ConfigError
from octavo.worker import device as devices
from octavo.worker import executor as executors
from octavo.worker.device import Device, Gpu, choose_device

H200 = Gpu(0, "NVIDIA H200", (9, 0), 150 << 30)
A100 = Gpu(1, "NVIDIA A100", (8, 0), 80 << 30)
V100 = Gpu(0, "Tesla V100", (7, 0), 16 << 30)


def chosen(monkeypatch: pytest.MonkeyPatch, *gpus: Gpu) -> Device:
    monkeypatch.setattr(devices, "visible_gpus", lambda: list(gpus))
    return choose_device()


def test_a_recent_gpu_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    device = chosen(monkeypatch, H200)
    assert (device.kind, device.label) == ("cuda", "cuda:0 NVIDIA H200")
    assert device.reason == "the GPU that CUDA shows, compute capability 9.0"
    assert "number 0 of 2 GPUs" in chosen(monkeypatch, H200, A100).reason


def test_an_older_gpu_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    assert chosen(monkeypatch, V100, A100).label == "cuda:1 NVIDIA A100"


def test_with_older_gpus_only_the_cpu_computes_and_one_line_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        device = chosen(monkeypatch, V100)
    assert (device.kind, device.label, device.gpu) == ("cpu", "cpu", None)
    assert device.reason == "Tesla V100 has compute capability 7.0, octavo's kernels need 8.0"
    assert [record.getMessage() for record in caplog.records] == [
        device.reason + ": running on the CPU"
    ]


def test_without_a_gpu_the_reason_says_what_is_missing(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(devices, "_DRIVER", tmp_path / "absent")
    assert chosen(monkeypatch).reason == "no NVIDIA GPU that torch can use"
    monkeypatch.setattr(devices, "_DRIVER", tmp_path)
    assert "built without CUDA" in chosen(monkeypatch).reason


def test_a_gpu_that_gives_no_context_ends_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise RuntimeError("CUDA error: all CUDA-capable devices are busy\nCompile with …")

    monkeypatch.setattr(torch.cuda, "set_device", lambda index: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", refuse)
    with pytest.raises(ConfigError, match="cuda:0 NVIDIA H200 cannot be used") as error:
        chosen(monkeypatch, H200).enter()
    assert "devices are busy)" in str(error.value) and "\n" not in str(error.value)
    Device("cpu", "").enter()


def test_the_worker_says_which_device_and_why(monkeypatch, model_r) -> None:
    from octavo.config import EngineConfig
    from octavo.flags import from_flags

    reason = "no NVIDIA GPU that torch can use"
    monkeypatch.setattr(devices, "choose_device", lambda: Device("cpu", reason))
    config = from_flags(EngineConfig, {"model": str(model_r), "num_gpu_blocks_override": 8})
    executor, info = executors.start_executor(config, model_r, lambda *news: None)
    executor.shutdown()
    assert (info.device, info.device_kind) == ("cpu", "cpu")
    assert info.reasons["device"] == reason
