"""Whole evaluations of small models."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from octavo.checkpoint.catalogue import silent
from octavo.cli.main import main
from octavo.config import EngineConfig
from octavo.evaluate.corpus import read_text
from octavo.evaluate.evaluate import Text, evaluate
from octavo.flags import from_flags
from octavo.text.tokenizer import load_tokenizer
from octavo.types import ConfigError
from tests.fixtures import models
from tests.model.running import all_logits, load

TEXT = Text("heldout.txt", read_text(None, "heldout")[0], chunk=96, max_tokens=400)


def config(name: str, **flags: Any) -> EngineConfig:
    path = str(models.path(name))
    return from_flags(EngineConfig, {"model": path, "dtype": "float32", **flags})


def reference(name: str) -> tuple[list[torch.Tensor], list[list[int]]]:
    """Logits of each chunk in FP32, by the tests' own driver, and the chunks."""
    path = models.path(name)
    ids = load_tokenizer(path).encode(TEXT.content, add_special_tokens=False)
    room, count = 95, len(ids) // 95
    bos = load_tokenizer(path).bos_id
    assert bos is not None
    starts = [(i * count // 4) * room for i in range(4)]
    chunks = [[bos, *ids[start : start + room]] for start in starts]
    return [all_logits(load(path), chunk, 40) for chunk in chunks], chunks


def test_figures_are_those_of_the_models_logits() -> None:
    report = evaluate(config("R-F32"), config("R-Q8_0"), TEXT, silent)
    logits, chunks = reference("R-F32")
    others, _ = reference("R-Q8_0")
    assert report.num_tokens == 4 * 95 and report.against and report.comparison
    nll, other_nll = (
        torch.cat(
            [
                F.cross_entropy(x[:-1].double(), torch.tensor(c[1:]), reduction="none")
                for x, c in zip(found, chunks)
            ]
        ).mean()
        for found in (logits, others)
    )
    assert report.model.perplexity == pytest.approx(math.exp(nll), rel=1e-5)
    assert report.against.perplexity == pytest.approx(math.exp(other_nll), rel=1e-5)
    ratio = math.exp(nll - other_nll)
    assert report.comparison.perplexity_ratio == pytest.approx(ratio, rel=1e-5)
    p, q = (
        torch.cat([x[:-1] for x in found]).double().log_softmax(-1) for found in (others, logits)
    )
    divergence = (p.exp() * (p - q)).sum(-1)
    assert report.comparison.kl_mean == pytest.approx(float(divergence.mean()), rel=1e-3)
    assert report.comparison.kl_max == pytest.approx(float(divergence.max()), rel=1e-3)
    agreement = (p.argmax(-1) == q.argmax(-1)).double().mean()
    assert report.comparison.top1_agreement == pytest.approx(float(agreement))


def test_a_model_and_itself_differ_by_nothing() -> None:
    report = evaluate(config("R-bf16"), config("R-bf16"), TEXT, silent)
    assert report.comparison and report.against
    assert report.comparison.kl_max == 0 and report.comparison.top1_agreement == 1
    assert report.comparison.perplexity_ratio == 1
    assert report.model == report.against


def test_sizes_are_of_the_layers_matrices() -> None:
    report = evaluate(config("R-bf16", dtype="bfloat16"), None, TEXT, silent)
    hidden, inner, layers = 64, 128, 2
    count = layers * (2 * hidden * hidden + 2 * hidden * 32 + 3 * hidden * inner)
    assert report.model.sizes.linear_weights == count
    assert report.model.sizes.linear_bytes == 2 * count
    assert report.model.sizes.bits_per_weight == 16
    assert report.comparison is None


def test_models_that_cannot_be_compared_are_refused() -> None:
    with pytest.raises(ConfigError, match="different tokenizers"):
        evaluate(config("R"), config("G-bf16"), TEXT, silent)
    with pytest.raises(ConfigError, match=r"logits of 320 tokens.* of 384"):
        evaluate(config("R"), config("R-vpad"), TEXT, silent)
    with pytest.raises(ConfigError, match="2048 positions; use --chunk 2048"):
        evaluate(config("R"), None, Text("x", TEXT.content, chunk=4096), silent)


def test_the_command_prints_json_and_a_table(
    model_r: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "text.txt"
    text.write_text(TEXT.content[:3000])
    tokens = ["eval", str(model_r), "--against", str(model_r), "--text", str(text)]
    tokens += ["--chunk", "64", "--max-tokens", "128", "--dtype", "float32", "--device", "cpu"]
    assert main([*tokens, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["comparison"]["kl_mean"] == 0 and found["num_tokens"] == 126
    assert main(tokens) == 0
    shown = capsys.readouterr().out
    assert "KL divergence, mean" in shown and "126 tokens" in shown


@pytest.mark.parametrize(
    ("tokens", "words"),
    [
        (["--text", "absent.txt"], "absent.txt: cannot be read"),
        (["--against-quantization", "int8"], "name it with --against"),
        (["--against", "R", "--against-quantization", "int9"], "--against R: --quantization int9"),
        (["--chunk", "1"], "--chunk 1: must be at least 2"),
        (["--against", "smollm-136m"], "smollm-136m"),
    ],
)
def test_what_cannot_be_is_said_in_one_line(
    tokens: list[str], words: str, model_r: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["eval", str(model_r), "--max-tokens", "2k", *tokens]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert [line for line in lines if words in line] == lines[-1:]
