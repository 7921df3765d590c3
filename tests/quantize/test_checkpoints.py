"""Checkpoints that are written hold the weights that were made, and run."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import pytest
import torch
from safetensors import safe_open

from octavo.checkpoint.catalogue import silent
from octavo.checkpoint.gguf import GGUFFile
from octavo.model.loader.gguf import dequantize
from octavo.quantize.gguf_file import quantize_gguf
from octavo.quantize.recipe import Recipe
from octavo.quantize.writer import CheckpointWriter
from octavo.text.tokenizer import load_tokenizer
from tests.fixtures import models
from tests.model.running import all_logits, load, random_ids, write_checkpoint
from tests.quantize.making import Recorder, make, read_back

pytestmark = pytest.mark.usefixtures("one_thread")

# Format and what else is asked for -> how far, by its output's error, a weight is at most.
RECIPES = [
    (Recipe("gptq"), 0.2),
    (Recipe("gptq", bits=3, group=32, symmetric=False, act_order=True), 0.4),
    (Recipe("gptq", bits=8, group=-1), 0.03),
    (Recipe("awq", group=32), 0.2),
    (Recipe("w4a16"), 0.2),
    (Recipe("squeezellm", bits=3), 0.3),
    (Recipe("squeezellm", sparse=True), 0.2),
    (Recipe("fp8"), 0.06),
    (Recipe("fp8_per_channel"), 0.06),
    (Recipe("fp8_per_block"), 0.06),
    (Recipe("int8"), 0.03),
    (Recipe("nf4"), 0.2),
    (Recipe("fp4"), 0.3),
    (Recipe("bnb_int8"), 0.03),
]


@pytest.mark.parametrize(("recipe", "furthest"), RECIPES, ids=str)
def test_a_written_checkpoint_holds_what_was_made(
    recipe: Recipe, furthest: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, output = models.path("R"), tmp_path / "out"
    recorded = Recorder(monkeypatch)
    outcome = make(path, output, recipe)
    original, found = read_back(path), read_back(output)
    assert len(recorded.weights) == 14
    for name, weight in original.items():
        made = recorded.weights.get(name.removesuffix(".weight"))
        if made is not None:
            torch.testing.assert_close(found[name], made.dense().float(), rtol=1e-6, atol=1e-8)
        elif recipe.format != "awq":
            assert torch.equal(found[name], weight), name
        if made is not None and recipe.format != "awq":  # whose matrices are scaled
            error = (found[name] - weight).norm() / weight.norm()
            assert 0 < float(error) < furthest, name
    assert outcome.after < 0.65 * outcome.before
    assert load_tokenizer(output).encode("a b") == load_tokenizer(path).encode("a b")
    ids = random_ids(40)
    logits, dense = all_logits(load(output), ids), all_logits(load(path), ids)
    left = (logits - dense).norm() / dense.norm()
    assert 0 < float(left) < 4 * furthest


@pytest.mark.parametrize("name", ["Phi3", "Qwen2", "Gemma", "Mixtral", "OPT"])
@pytest.mark.parametrize("format", ["gptq", "awq", "fp8"])
def test_families_are_written_and_run(
    name: str, format: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fused and shared tensors, biases, norms stored less 1, experts (which stay dense)."""
    changes = {"num_hidden_layers": 2}
    if name == "Mixtral":
        changes |= {"num_local_experts": 4, "num_experts_per_tok": 2}
    if name == "OPT":
        changes |= {"ffn_dim": 96, "word_embed_proj_dim": 64, "max_position_embeddings": 1024}
    path, output = tmp_path / "dense", tmp_path / "out"
    write_checkpoint(path, name, **{"max_position_embeddings": 1024, **changes})
    recorded = Recorder(monkeypatch)
    group = 32 if format != "fp8" else None
    make(path, output, Recipe(format, group=group), models.path("R"))
    found = read_back(output)
    for key, weight in recorded.weights.items():
        made = weight.dense().float()
        torch.testing.assert_close(found[f"{key}.weight"], made, rtol=1e-6, atol=1e-8)
    ids = random_ids(40)
    logits, dense = all_logits(load(output), ids), all_logits(load(path), ids)
    assert 0 < float((logits - dense).norm() / dense.norm()) < 0.7
    config = json.loads((output / "config.json").read_text())["quantization_config"]
    if name == "Mixtral" and format == "fp8":
        assert any("experts" in module for module in config["ignored_layers"])


def test_a_head_is_quantized_where_asked(tmp_path: Path) -> None:
    make(models.path("R"), tmp_path / "out", Recipe("gptq", group=32, head=True))
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        names = set(file.keys())
    assert "lm_head.qweight" in names and "lm_head.weight" not in names


def test_a_gguf_file_becomes_a_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, output = models.path("R-F16"), tmp_path / "out"
    recorded = Recorder(monkeypatch)
    make(path, output, Recipe("gptq"))
    original, found = read_back(path), read_back(output)
    for name, weight in original.items():
        made = recorded.weights.get(name.removesuffix(".weight"))
        expected = weight if made is None else made.dense().float()
        torch.testing.assert_close(found[name], expected, rtol=2e-3, atol=1e-6)
    text = "Hello  world, 123.\n\nÄh"
    assert load_tokenizer(output).encode(text) == load_tokenizer(path).encode(text)
    assert load_tokenizer(output).templates == load_tokenizer(path).templates


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_1", "Q8_0"])
def test_a_gguf_file_becomes_another(kind: str, tmp_path: Path) -> None:
    path = models.path("R-F16")
    file, outcome = quantize_gguf(path, tmp_path / "out", Recipe(f"gguf-{kind.lower()}"), silent)
    source, made = GGUFFile(path), GGUFFile(file)
    assert list(source.tensors) == list(made.tensors)
    for name, tensor in source.tensors.items():
        assert made.tensors[name].shape == tensor.shape
        if not name.startswith("blk.") or len(tensor.shape) < 2:
            assert made.copied(name).tobytes() == source.copied(name).tobytes()
            continue
        values = dequantize(source.copied(name), tensor.type.name, name, "", torch.float32)
        rows = values.numpy().reshape(tensor.shape)
        expected = gguf.quants.quantize(rows, gguf.GGMLQuantizationType[kind])
        assert made.tensors[name].type.name == kind
        assert made.copied(name).tobytes() == expected.tobytes()
    for key, value in source.metadata.items():
        if key not in ("general.file_type", "general.quantization_version"):
            assert str(made.metadata[key]) == str(value)
    assert outcome.after == file.stat().st_size < outcome.before
    ids = random_ids(20)
    assert all_logits(load(file), ids).isfinite().all()


def test_shards_are_read_by_the_formats_own_library(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    tensors = {
        "odd": torch.arange(7, dtype=torch.uint8),
        "a": torch.randn(30, 10, generator=generator),
        "b": torch.randn(50, 10, generator=generator).bfloat16(),
        "empty": torch.zeros(0, 4),
        "c": torch.randn(10, 10, generator=generator).to(torch.float8_e4m3fn),
        "d": torch.randint(0, 9, (25, 10), generator=generator),
    }
    writer = CheckpointWriter(tmp_path, largest=2200)
    for name, tensor in tensors.items():
        writer.add(name, tensor)
    with pytest.raises(ValueError, match="twice"):
        writer.add("a", tensors["a"])
    names = [file.name for file in writer.finish()]
    assert names == [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(tensors)
    assert index["metadata"]["total_size"] == sum(t.numel() * t.itemsize for t in tensors.values())
    for name, tensor in tensors.items():
        with safe_open(tmp_path / index["weight_map"][name], "pt") as file:
            found = file.get_tensor(name)
        assert found.dtype == tensor.dtype and found.shape == tensor.shape
        assert torch.equal(found.view(torch.uint8), tensor.view(torch.uint8))
    assert not list(tmp_path.glob("unfinished*"))
