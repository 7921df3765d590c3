"""What cannot fit is refused before it is loaded; what might is not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from octavo import LLM
from octavo.config import EngineConfig
from octavo.flags import from_flags
from octavo.plan import refusal
from octavo.plan.local import Found
from octavo.plan.refusal import check_fits
from octavo.types import ConfigError
from tests.plan.headers import LLAMA_70B, write_config, write_hollow

WEIGHTS = 137_953_296_384
GIB = 1 << 30


@pytest.fixture
def large(tmp_path: Path) -> Path:
    return write_hollow(tmp_path / "llama-2-70b", LLAMA_70B)


@pytest.fixture
def cpu(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setattr(refusal, "visible_devices", list)
    monkeypatch.setattr(refusal, "available_memory", lambda: 64 * GIB)
    return monkeypatch


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setattr(refusal, "visible_devices", lambda: ["0", "1", "2", "3"])
    monkeypatch.setattr(refusal, "gpus_here", lambda: [Found("NVIDIA H100", 80 * GIB, 9.0)] * 4)
    monkeypatch.setattr(refusal, "torch_cuda", lambda: 12)
    monkeypatch.setattr(refusal, "_driver_cuda", lambda: 13)
    return monkeypatch


def check(path: Path, **flags: Any) -> None:
    check_fits(from_flags(EngineConfig, {"model": str(path), **flags}), path)


def test_a_cpu_refuses_in_one_line_before_anything_is_loaded(cpu, large):
    with pytest.raises(ConfigError) as told:
        LLM(str(large), skip_tokenizer_init=True)
    assert "\n" not in str(told.value)
    assert "128.48 GiB as bfloat16" in str(told.value) and "64.00 GiB" in str(told.value)
    assert "--quantization bitsandbytes" in str(told.value)
    check(large, quantization="bitsandbytes")
    with pytest.raises(ConfigError, match=r"256\.\d+ GiB as float32"):
        check(large, dtype="float32")


def test_weights_that_fit_to_the_byte_are_not_refused(cpu, large):
    cpu.setattr(refusal, "available_memory", lambda: WEIGHTS)
    check(large)
    cpu.setattr(refusal, "available_memory", lambda: WEIGHTS - 1)
    with pytest.raises(ConfigError, match=r"need 128\.48 GiB"):
        check(large)


def test_a_gpu_refuses_and_names_what_fits(gpus, large):
    with pytest.raises(ConfigError, match=r"-tp 2 \(64.24 GiB a rank\), --quantization fp8"):
        check(large)
    check(large, tensor_parallel_size=2)
    check(large, quantization="fp8")


def test_what_is_not_known_is_not_refused(gpus, large, tmp_path):
    check(write_config(tmp_path / "config-alone", LLAMA_70B))
    check(large, load_format="dummy")
    check(large, nnodes=2, tensor_parallel_size=2)
    check(large, quantization="awq")  # which it is not: the loader says so
    for name, value in (
        ("gpus_here", list),  # no nvidia-smi
        ("gpus_here", lambda: [Found("H100", 80 * GIB, 9.0), Found("V100", 32 * GIB, 7.0)]),
        ("_driver_cuda", lambda: 11),  # torch then runs on the CPU
        ("gpus_here", lambda: [Found("H100", 80 * GIB, 9.0), Found("large", 200 * GIB, 9.0)]),
    ):
        with gpus.context() as patched:
            patched.setattr(refusal, name, value)
            check(large)


def test_a_torch_without_cuda_counts_the_memory_of_the_cpu(gpus, large):
    gpus.setattr(refusal, "torch_cuda", lambda: None)
    gpus.setattr(refusal, "available_memory", lambda: 200 * GIB)
    check(large)


def test_a_small_model_is_not_looked_at(cpu, tmp_path, monkeypatch):
    def never(*arguments: object) -> None:
        raise AssertionError("the headers were read")

    monkeypatch.setattr(refusal, "read_checkpoint", never)
    small = {**LLAMA_70B, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1}
    check(write_hollow(tmp_path, {**small, "num_attention_heads": 8}))
