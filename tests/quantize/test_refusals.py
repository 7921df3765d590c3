"""What cannot be quantized is said in one line, and leaves nothing behind."""

from __future__ import annotations

import json
import resource
from pathlib import Path

import pytest

from octavo.cli.main import main
from octavo.quantize.recipe import Recipe
from octavo.types import ConfigError
from tests.fixtures import models
from tests.model.running import write_checkpoint
from tests.quantize.making import make


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ([], "--format is missing: choose from gptq, awq"),
        (["--format", "gptq", "--output", ""], "--output is missing"),
        (["--format", "gguf"], "--format gguf: choose from"),
        (["--format", "awq", "--bits", "8"], "--bits 8: --format awq has 4"),
        (["--format", "awq", "--sym"], "--sym: --format awq"),
        (["--format", "w4a16", "--no-sym"], "--no-sym: --format w4a16 is symmetric"),
        (["--format", "fp8", "--group-size", "64"], "--format fp8 has no groups"),
        (["--format", "awq", "--desc-act"], "only gptq has an order"),
        (["--format", "gptq", "--sparse"], "only squeezellm keeps outliers"),
        (["--format", "fp8", "--calibration", "x.txt"], "learns from no text"),
        (["--format", "gptq", "--calibration", "absent.txt"], "absent.txt: cannot be read"),
        (["--format", "gptq", "--group-size", "48"], "48 does not divide the 64 inputs of model."),
        (["--format", "gptq", "--calibration-tokens", "500"], "needs at least 1,024"),
        (["--format", "gguf-q4_0"], "is no GGUF file; convert it"),
    ],
)
def test_a_refusal_is_one_line(
    flags: list[str],
    words: str,
    model_r: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    output = tmp_path / "out"
    if "--output" not in flags:
        flags = [*flags, "--output", str(output)]
    else:
        flags = flags[:-2]
    assert main(["quantize", str(model_r), "--device", "cpu", *flags]) == 2
    error = capsys.readouterr().err.splitlines()
    assert [line for line in error if words in line] == error[-1:], error
    assert not output.exists()


def test_a_directory_that_holds_something_is_left_alone(
    model_r: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    tokens = ["quantize", str(model_r), "--format", "int8", "--output", str(tmp_path)]
    assert main(tokens) == 2
    assert "is not empty" in capsys.readouterr().err
    assert [file.name for file in tmp_path.iterdir()] == ["notes.txt"]


def test_a_quantized_checkpoint_is_refused(tmp_path: Path) -> None:
    make(models.path("R"), tmp_path / "int8", Recipe("int8"))
    with pytest.raises(ConfigError, match="is quantized already"):
        make(tmp_path / "int8", tmp_path / "again", Recipe("int8"))


def test_matrices_stored_the_other_way_round_are_refused(tmp_path: Path) -> None:
    small = {"n_embd": 64, "n_layer": 1, "n_head": 4, "n_positions": 64, "n_inner": 96}
    write_checkpoint(tmp_path / "gpt2", "GPT2", **small)
    with pytest.raises(ConfigError, match="Conv1D"):
        make(tmp_path / "gpt2", tmp_path / "out", Recipe("int8"), models.path("R"))


def test_a_tied_head_and_a_full_disk_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_checkpoint(tmp_path / "tied", "Llama", tie_word_embeddings=True)
    with pytest.raises(ConfigError, match="is its embedding"):
        make(tmp_path / "tied", tmp_path / "out", Recipe("int8", head=True), models.path("R"))
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 1000}))
    with pytest.raises(ConfigError, match=r"needs up to 0.0 GB, 0.0 GB are free"):
        make(models.path("R"), tmp_path / "out", Recipe("int8"))


def test_what_fails_half_way_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object, **more: object) -> None:
        raise ValueError("no such luck")

    monkeypatch.setattr("octavo.quantize.methods.gptq", fail)
    with pytest.raises(ConfigError, match="layer 0: no such luck"):
        make(models.path("R"), tmp_path / "out", Recipe("gptq"))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("kind", ("int8", "gguf-q8_0"))
def test_a_disk_that_fills_leaves_nothing(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Neither the directory nor those above it."""
    source = models.path("R-F16" if "gguf" in kind else "R")
    source = source / "model.gguf" if source.is_dir() and "gguf" in kind else source
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    output = tmp_path / "new" / "deep" / "out"
    tokens = ["quantize", str(source), "--format", kind, "--device", "cpu", "-o", str(output)]
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    try:
        assert main(tokens) == 2
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert f"--output {output}: cannot be written: " in capsys.readouterr().err.splitlines()[-1]
    assert not (tmp_path / "new").exists()


def test_what_cannot_be_a_directory_is_refused(
    model_r: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("mine")
    for name, words in (("file/a/b", f"{tmp_path}/file is a file"), ("a" * 300, "too long")):
        tokens = ["quantize", str(model_r), "--format", "int8", "-o", str(tmp_path / name)]
        assert main([*tokens, "--device", "cpu"]) == 2
        assert words in capsys.readouterr().err.splitlines()[-1]


def test_the_command_says_what_it_made_and_what_that_lost(
    model_r: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "out"
    tokens = ["quantize", str(model_r), "--format", "fp8_per_channel", "-o", str(output)]
    assert main([*tokens, "--eval-tokens", "1024", "--dtype", "float32", "--device", "cpu"]) == 0
    shown = capsys.readouterr().out
    assert "451.3 KiB before" in shown and "KL divergence, mean" in shown
    config = json.loads((output / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] == "compressed-tensors"
