"""Quantized checkpoints of small models, and what their weights were to be."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest
import torch

from octavo.checkpoint.catalogue import silent
from octavo.config import ModelConfig
from octavo.evaluate.corpus import read_text
from octavo.model.decoder import Model
from octavo.model.loader.load import open_source
from octavo.model.loader.source import WHOLE, check_complete
from octavo.ops.weights import Quantized
from octavo.quantize.layers import LayerAtWork
from octavo.quantize.outcome import Outcome
from octavo.quantize.recipe import Recipe
from octavo.quantize.run import CalibrationText, quantize_checkpoint
from octavo.text.tokenizer import load_tokenizer

TEXT = CalibrationText("calibration.txt", read_text(None, "calibration")[0][:20_000], 2048)


def make(path: Path, output: Path, recipe: Recipe, tokenizer: Path | None = None) -> Outcome:
    """In FP32, on the CPU."""
    read = load_tokenizer(tokenizer or path)
    return quantize_checkpoint(path, output, recipe, TEXT, read, "cpu", silent, "float32")


class Recorder:
    """The weights of projections as they are quantized, by our name."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.weights: dict[str, Quantized] = {}
        put = LayerAtWork.put_part

        def record(work: LayerAtWork, name: str, weight: Quantized) -> None:
            self.weights[name] = weight
            put(work, name, weight)

        monkeypatch.setattr(LayerAtWork, "put_part", record)


def read_back(path: Path) -> dict[str, torch.Tensor]:
    """All that a model wants of a checkpoint, dense, by our names."""
    with closing(open_source(path, ModelConfig(model=str(path), dtype="float32"))) as source:
        model = Model(source.spec, torch.float32)
        wanted = {name: shape for part in model.parts() for name, shape in part.wanted()}
        shares = check_complete(source, wanted)
        found = {}
        for name, shape in wanted.items():
            weight = source.fetch(name, shape, torch.float32, shares.get(name, WHOLE))()
            found[name] = weight if isinstance(weight, torch.Tensor) else weight.dense()
        return found
