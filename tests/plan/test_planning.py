"""``octavo plan``: the guide's example, what was measured on a GPU, the lists, and what is said."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from octavo.cli.arguments import Command, parse
from octavo.cli.main import main
from octavo.config import EngineConfig, ServerConfig
from tests.plan.headers import LLAMA_8B, LLAMA_70B, write_config, write_hollow


@pytest.fixture
def llama_70b(tmp_path: Path) -> Path:
    return write_config(tmp_path / "llama-2-70b", LLAMA_70B)


@pytest.fixture
def llama_8b(tmp_path: Path) -> Path:
    return write_hollow(tmp_path / "llama-8b", LLAMA_8B)


def planned(capsys: pytest.CaptureFixture[str], *words: object) -> dict[str, Any]:
    assert main(["plan", *map(str, words), "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_the_guides_example_takes_21_gb_not_26(llama_70b, capsys):
    found = planned(capsys, llama_70b, "--gpu", "h100", "--requests", 32, "--tokens", 2048)
    assert found["kv_bytes_per_token"] == 2 * 80 * 8 * 128 * 2
    assert found["kv_load_bytes"] == 21_474_836_480  # 20.0 GiB
    assert found["weight_bytes"] == 137_953_296_384
    assert main(["plan", str(llama_70b), "--gpu", "h100"]) == 0
    assert "20.0 GiB (21.5 GB)" in capsys.readouterr().out


def test_by_the_formula_as_written_it_would_be_eight_times_that(tmp_path, capsys):
    path = write_config(tmp_path, {**LLAMA_70B, "num_key_value_heads": 64})
    found = planned(capsys, path, "--gpu", "h100")
    assert found["kv_load_bytes"] == 171_798_691_840


# What starts on an H200 said of themselves (benchmarks/results/gpu_quantized.json). The plan has
# 0.1 % and 0.6 % more blocks: weights rounded while loading leave gaps in the allocator's memory.
@pytest.mark.parametrize(
    ("flags", "weights", "blocks", "rate"),
    [((), 16_060_522_496, 14_247, 260.0), (("-q", "fp8"), 9_086_705_664, 15_008, 384.0)],
    ids=["BF16", "FP8"],
)
def test_an_h200_had_these_bytes_and_nearly_these_blocks(
    llama_8b, capsys, flags, weights, blocks, rate
):
    found = planned(capsys, llama_8b, "--gpu", "h200", "--max-model-len", 34_000, *flags)
    assert found["counted_from"] == "headers"
    assert found["weight_bytes"] == weights
    assert found["plan"]["num_blocks"] == pytest.approx(blocks, rel=0.01)
    assert found["one_request"]["tokens_per_second"] == pytest.approx(rate, rel=0.05)


def test_every_line_of_both_lists_has_a_number_a_reason_and_a_command_that_parses(
    llama_70b, llama_8b, capsys
):
    serve = Command("serve", "", (EngineConfig, ServerConfig), migrating=True)
    for words in (
        (llama_70b, "--gpu", "h100"),  # does not fit
        (llama_70b, "--gpu", "h200", "--num-gpus", 4),
        (llama_8b, "--gpu", "l4", "--kv-cache-dtype", "fp8", "--hf-overrides.rope_theta", 1e6),
        (llama_8b, "--memory", "24GiB", "--no-enable-chunked-prefill"),
        (llama_8b, "--gpu", "a100", "-q", "int8", "-dp", 2),
    ):
        found = planned(capsys, *words)
        assert (len(found["out_of_memory"]), len(found["tuning"])) == (3, 8)
        for answer in (*found["out_of_memory"], *found["tuning"]):
            assert any(char.isdigit() for char in answer["number"]), answer
            assert answer["reason"], answer
            tokens = shlex.split(answer["command"].partition(" & ")[0])
            asked = tokens[tokens.index("serve", tokens.index("octavo")) + 1 :]
            parse(serve, asked).build(EngineConfig)


def test_what_does_not_fit_is_told_with_what_does(llama_70b, capsys):
    found = planned(capsys, llama_70b, "--gpu", "h100")
    assert not found["fits"] and found["devices_needed"] == 2
    at_start, while_running, _ = found["out_of_memory"]
    assert at_start["command"].endswith("llama-2-70b -q fp8")
    assert "-q fp8" in while_running["command"]  # which would not start without
    kept = {row["name"]: row["fits"] for row in found["weights_kept_as"]}
    assert kept == {
        **dict.fromkeys(("fp8", "int8", "bitsandbytes", "awq"), True),
        "float16": False,
    }


def test_the_best_layout_is_taken_unless_one_is_asked_for(llama_70b, capsys):
    found = planned(capsys, llama_70b, "--gpu", "h100", "--num-gpus", 2)
    best = found["layout"]
    assert (best["tp"], best["pp"], best["dp"]) == (2, 1, 1)
    assert best["fits"] and found["command"].endswith(" -tp 2")
    assert not any(row["runs"] for row in found["layouts"] if row["pp"] > 1)
    found = planned(capsys, llama_70b, "--gpu", "h100", "--num-gpus", 2, "-dp", 2)
    assert (found["layout"]["tp"], found["layout"]["dp"]) == (1, 2)
    assert len(found["weight_bytes_per_rank"]) == 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--num-gpus", "2", "-tp", "4"), "--num-gpus 4"),
        (("-tp", "65", "--gpu", "h100"), "64 attention heads"),
        (("--gpu", "h100", "--dtype", "float32"), "16-bit"),
        (("--gpu", "b900"), "h200"),
    ],
    ids=["layout", "heads", "FP32", "GPU"],
)
def test_what_cannot_be_is_one_line(llama_70b, capsys, words, said):
    assert main(["plan", str(llama_70b), *words]) == 2
    line = capsys.readouterr().err
    assert line.count("\n") == 1 and said in line


def test_a_plan_imports_no_torch(llama_8b):
    script = (
        "import sys; from octavo.cli.main import main; assert main(sys.argv[1:]) == 0;"
        "print(*(name for name in ('torch', 'transformers') if name in sys.modules), sep='!')"
    )
    command = [sys.executable, "-c", script, "plan", str(llama_8b), "--gpu", "h200"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == ""
    assert "What this rests on" in done.stdout
