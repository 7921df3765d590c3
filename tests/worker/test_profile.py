"""Traces: what is written, and what is told about them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from octavo.cli.bench.latency import profile_report
from octavo.cli.main import main
from octavo.config import EngineConfig
from octavo.flags import from_flags
from octavo.llm import LLM
from octavo.types import ConfigError, SamplingParams
from octavo.worker import profile as profiles
from octavo.worker.executor import CudaExecutor, UniExecutor
from octavo.worker.profile import kind_of, summarize
from tests.worker.plans import New, Row, plan

FLAGS = {"dtype": "float32", "num_gpu_blocks_override": 64}
GREEDY = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(model_r: Path) -> Iterator[LLM]:
    made = LLM(str(model_r), **FLAGS)
    yield made
    made.close()


def trace(path: Path, *events: tuple[str, str, float, float]) -> Path:
    """``events``: category, name, begin and duration in microseconds."""
    written = [
        {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur} for cat, name, ts, dur in events
    ]
    path.write_text(json.dumps({"traceEvents": [*written, {"ph": "M", "name": "process"}]}))
    return path


def test_kernels_count_by_kind_and_gaps_are_found(tmp_path: Path) -> None:
    found = summarize(
        trace(
            tmp_path / "t.json",
            ("cpu_op", "aten::mm", 0, 1000),
            ("kernel", "decode_attention_kernel", 100, 20),
            ("kernel", "gemv_kernel", 120, 30),
            ("kernel", "skinny_gemm", 140, 30),
            ("gpu_memcpy", "Memcpy DtoH", 180, 10),
            ("kernel", "rms_norm_kernel", 250, 50),
        ),
        num_steps=3,
    )
    assert list(found.kinds) == ["linear", "norm", "attention", "copies"]
    assert found.kinds["linear"] == (2, pytest.approx(60e-6))
    assert found.span == pytest.approx(200e-6) and found.num_steps == 3
    assert found.idle == pytest.approx(70e-6) and found.longest_gap == pytest.approx(60e-6)
    assert "70 us" not in profile_report(found) and "longest gap 60 us" in profile_report(found)


def test_without_kernels_operators_count_their_own_time(tmp_path: Path) -> None:
    found = summarize(
        trace(
            tmp_path / "t.json",
            ("cpu_op", "aten::linear", 0, 100),
            ("cpu_op", "aten::copy_", 10, 20),
            ("cpu_op", "aten::mm", 30, 50),
            ("cpu_op", "aten::silu", 100, 10),
            ("user_annotation", "step 1", 0, 500),
        ),
        num_steps=1,
    )
    times = {kind: round(seconds * 1e6) for kind, (_, seconds) in found.kinds.items()}
    assert times == {"linear": 80, "copies": 20, "activation": 10}
    assert found.span == pytest.approx(110e-6) and found.idle == 0


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("_split_decode_attention", "attention"),
        ("sm90_xmma_gemm_bf16", "linear"),
        ("nvjet_tst_128x8", "linear"),
        ("add_rms_norm_kernel", "norm"),
        ("void at::native::elementwise_kernel<add>", "other"),
        ("Memset (Device)", "copies"),
        ("argmax_partial", "sampler"),
    ],
)
def test_kinds_are_read_from_names(name: str, kind: str) -> None:
    assert kind_of(name) == kind


def test_a_trace_holds_the_steps_of_the_worker(llm: LLM, tmp_path: Path) -> None:
    llm.start_profile(tmp_path)
    llm.generate([[5, 6, 7], [8, 9]], GREEDY, use_tqdm=False)
    found = llm.stop_profile()
    assert found.trace == tmp_path / "steps-1.json"
    assert found.num_steps == 5
    assert found.kinds["linear"][0] > 0 and found.span > found.longest_gap > 0
    names = [e.get("name", "") for e in json.loads(found.trace.read_text())["traceEvents"]]
    assert sum(name.endswith(": 2 rows, 5 tokens") for name in names) == 1
    assert sum(name.endswith(": 2 rows, 2 tokens") for name in names) == 4
    llm.start_profile(tmp_path)
    llm.generate([[5, 6, 7]], GREEDY, use_tqdm=False)
    assert llm.stop_profile().trace == tmp_path / "steps-2.json"


def test_traces_begin_and_end_in_pairs(llm: LLM, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no steps are being traced"):
        llm.stop_profile()
    llm.start_profile(tmp_path)
    with pytest.raises(ConfigError, match="already"):
        llm.start_profile(tmp_path)
    llm.generate([[5, 6, 7]], GREEDY, use_tqdm=False)
    llm.stop_profile()
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="file: cannot be written"):
        llm.start_profile(tmp_path / "file")
    assert len(llm.generate([[5]], GREEDY, use_tqdm=False)[0].outputs[0].token_ids) == 5


def test_bench_latency_profiles_a_few_steps(
    model_r: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--dtype", "float32", "--num-gpu-blocks-override", "64", "--disable-tqdm"]
    sizes = ["--batch-size", "2", "--output-len", "40", "--num-iters-warmup", "1"]
    where = ["--profile", "--profile-result-dir", str(tmp_path)]
    assert main(["bench", "latency", str(model_r), *flags, *sizes, *where]) == 0
    shown = capsys.readouterr().out
    assert "16 steps in" in shown and "linear" in shown and "steps-1.json" in shown


def test_nvtx_surrounds_every_step(model_r: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ranges: list[str] = []

    def note(text: str) -> Any:
        ranges.append(text)
        return nullcontext()

    monkeypatch.setattr(torch.cuda.nvtx, "range", note)
    monkeypatch.setattr(profiles, "check_nvtx", lambda: None)
    made = LLM(str(model_r), **FLAGS, nvtx=True)
    made.generate([[5, 6, 7]], GREEDY, use_tqdm=False)
    made.close()
    assert len(ranges) == 5 and ranges[0].endswith("1 rows, 3 tokens")


def test_nvtx_without_cuda_ends_the_start(model_r: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    config = from_flags(EngineConfig, {"model": str(model_r), "nvtx": True})
    with pytest.raises(ConfigError, match="--nvtx"):
        UniExecutor(config, model_r).start(lambda *news: None)


class FakeRunner:
    """In the place of a CudaRunner: launches are noted, results come at once."""

    num_pending = 0

    def __init__(self) -> None:
        self.launched: list[int] = []

    def start(self, progress: Any) -> None:
        return None

    def launch(self, plan: Any) -> Any:
        self.launched.append(plan.step)
        torch.ones(4).mul_(2)
        return SimpleNamespace(finish=lambda: plan.step)


def test_the_executor_of_a_gpu_traces_its_launches(tmp_path: Path) -> None:
    executor = CudaExecutor(FakeRunner())  # type: ignore[arg-type]
    executor.start(lambda *news: None)
    executor.submit(plan(Row(0, 0, 1, draw=True, blocks=[0]), new=(New(0, [3]),), step=1))
    executor.start_profile(tmp_path)
    executor.submit(plan(Row(0, 1, 1, draw=True), step=2))
    found = executor.stop_profile()
    assert [executor.collect(), executor.collect()] == [1, 2]
    assert found.num_steps == 1 and found.span > 0
    assert "step 2: 1 rows, 1 tokens" in found.trace.read_text()
