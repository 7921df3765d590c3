"""From what was typed to a quantized checkpoint: finds the model, the device and the tokenizer."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from octavo.checkpoint.locate import locate
from octavo.config import EngineConfig
from octavo.evaluate.evaluate import enter_device, free_memory
from octavo.quantize.files import check_output
from octavo.quantize.gguf_file import quantize_gguf
from octavo.quantize.recipe import Recipe
from octavo.quantize.run import CalibrationText, quantize_checkpoint
from octavo.text.tokenizer import load_tokenizer
from octavo.types import Progress


@dataclass(frozen=True)
class Made:
    """``path``: what a model is given as; ``source``: the original's. Bytes of the files with
    weights, ``before`` and ``after``. ``notes``: what was decided."""

    path: Path
    source: Path
    before: int
    after: int
    notes: tuple[str, ...]


def quantize(
    config: EngineConfig,
    output: Path,
    recipe: Recipe,
    text: CalibrationText,
    device: str,
    progress: Progress,
) -> Made:
    """Makes ``output``. ``device``: "auto", "cpu" or "cuda". Raises ConfigError, in one line, for
    what cannot be done."""
    check_output(output)
    found = locate(config.model.model, config.model.revision, progress=progress)
    if recipe.kind.gguf is not None:
        file, outcome = quantize_gguf(found.path, output, recipe, progress)
        return Made(file, found.path, outcome.before, outcome.after, tuple(outcome.notes))
    where = enter_device(device, config.parallel.cpu_threads)
    tokenizer = load_tokenizer(found.path, config.model.tokenizer)
    outcome = quantize_checkpoint(
        found.path, output, recipe, text, tokenizer, where.kind, progress, config.model.dtype
    )
    free_memory()
    return Made(output, found.path, outcome.before, outcome.after, tuple(outcome.notes))
