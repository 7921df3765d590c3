"""Quantizes a checkpoint: layer by layer, from a directory or GGUF file to a directory."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from octavo.evaluate.corpus import cut
from octavo.model.decoder import Model
from octavo.model.dtype import choose_dtype
from octavo.model.layer import Layer
from octavo.model.spec import MoESpec
from octavo.quantize import files
from octavo.quantize.layers import Calibration, LayerAtWork, quantizable
from octavo.quantize.methods import Method, method_of
from octavo.quantize.modules import Module, dense_modules, layer_modules, modules_of
from octavo.quantize.outcome import Outcome
from octavo.quantize.recipe import Recipe
from octavo.quantize.source import DTYPES, Source
from octavo.quantize.target import Target, target_of
from octavo.quantize.writer import LARGEST_SHARD, CheckpointWriter
from octavo.text.tokenizer import Tokenizer
from octavo.types import ConfigError, Progress

CHUNK = 1024  # tokens of a context of the calibration text


@dataclass(frozen=True)
class CalibrationText:
    """``num_tokens``: that are used at most."""

    name: str
    content: str
    num_tokens: int


@torch.inference_mode()
def quantize_checkpoint(
    path: Path,
    output: Path,
    recipe: Recipe,
    text: CalibrationText,
    tokenizer: Tokenizer,
    device: str,
    progress: Progress,
    dtype: str = "auto",
) -> Outcome:
    """``path``: a checkpoint directory or a GGUF file; ``output``: a directory that is not there,
    or empty. ``device``: "cpu" or "cuda". Raises ConfigError, in one line, for what cannot be
    done, before anything is written where that is known."""
    recipe = recipe.checked()
    files.check_output(output)
    with closing(Source(path, device)) as source:
        computed, _ = choose_dtype(dtype, device, source.dtype)
        model = Model(source.spec, computed, device)
        source.check(model)
        work = _Run(source, model, recipe)
        files.check_space(output, work.estimate())
        chunks = _chunks(tokenizer, text, model) if recipe.kind.calibrated else []
        with files.made(output):
            if source.is_gguf:
                files.write_tokenizer(tokenizer, output, text.content)
            return work.run(output, chunks, progress)


def _chunks(tokenizer: Tokenizer, text: CalibrationText, model: Model) -> list[list[int]]:
    size = min(CHUNK, model.spec.max_position)
    prefix = tokenizer.vocabulary.prefix_ids
    room = size - len(prefix)
    ids = tokenizer.encode(text.content, add_special_tokens=False)
    if len(ids) < room or text.num_tokens < size:
        raise ConfigError(
            f"{text.name}: {len(ids):,} tokens, of which --calibration-tokens takes "
            f"{text.num_tokens:,}: calibration needs at least {size:,}"
        )
    return [[*prefix, *chunk] for chunk in cut(ids, room, text.num_tokens * room // size)]


class _Run:
    def __init__(self, source: Source, model: Model, recipe: Recipe) -> None:
        self.source = source
        self.model = model
        self.modules = [layer_modules(layer, source) for layer in model.layers]
        head = model.embedding.head
        self.head: list[Module] = []
        if recipe.head and model.spec.embedding.tied:
            raise ConfigError(
                f"--quantize-head: the head of {source.path} is its embedding (tied), which stays "
                "as it is; leave it out"
            )
        if recipe.head:
            self.head = modules_of([head], source)
        self.recipe = recipe.fitted({m.name: m.inputs for m in self._all()})
        self.target: Target = target_of(self.recipe)
        self._check()
        self.skipped = dense_modules(model, source, recipe.head)
        self.method: Method = method_of(self.recipe, self.target, source)

    def _all(self) -> list[Module]:
        return [module for some in (*self.modules, self.head) for module in some]

    def _check(self) -> None:
        if not self._all():
            raise ConfigError(f"{self.source.path}: has no linears that could be quantized")
        for module in self._all():
            try:
                self.target.format.check(module.outputs, module.inputs)
            except ValueError as error:
                raise ConfigError(
                    f"--format {self.recipe.format}: {module.name}: {error}"
                ) from None

    def estimate(self) -> int:
        """Bytes of the output, and of the shard that is written twice: at most that."""
        bits = (self.recipe.bits or 8) + 32 / (self.recipe.group or 64)
        count = sum(module.outputs * module.inputs for module in self._all())
        wanted = (shape for part in self.model.parts() for _, shape in part.wanted())
        dense = sum(map(math.prod, wanted)) - count
        total = int(count * bits / 8) + dense * self.source.dtype.itemsize
        return total + min(total, LARGEST_SHARD)

    def run(self, output: Path, chunks: Sequence[list[int]], progress: Progress) -> Outcome:
        notes = self._notes()
        writer = CheckpointWriter(output)
        phase = f"quantizing to {self.recipe.format}"
        calibration = self._calibration(chunks)
        count = len(self.model.layers)
        replaced: dict[str, object] = {}
        for index in range(count):
            progress(phase, index / count)
            layer = self.model.layers[index]
            work = self._quantized(index, layer, calibration)
            replaced |= self._write(writer, self.modules[index], work)
            # Its packed weights are not needed again.
            self.model.layers[index] = None  # type: ignore[call-overload]
        progress(phase, 1.0)
        for module in self.head:
            replaced |= self._write_head(writer, module)
        progress("copying the other tensors", 0.0)
        for passed in self.source.passed(replaced):
            size = math.prod(passed.shape) * DTYPES[passed.dtype].itemsize
            writer.add_raw(passed.name, passed.dtype, passed.shape, passed.chunks, size)
        written = writer.finish()
        self._write_config(output)
        progress("copying the other tensors", 1.0)
        before = files.weight_bytes(self.source.path)
        after = sum(file.stat().st_size for file in written)
        return Outcome(before, after, notes)

    def _notes(self) -> list[str]:
        notes = []
        if self.recipe.kind.groups:
            group = self.recipe.group or 0
            notes.append(f"groups of {group if group > 0 else 'all'} inputs")
        if any(isinstance(layer.mlp, MoESpec) for layer in self.model.spec.layers):
            notes.append("experts and routers stay as they are")
        if self.source.is_gguf:
            notes.append("the GGUF file's weights were expanded first")
        return notes

    def _calibration(self, chunks: Sequence[list[int]]) -> Calibration | None:
        if not chunks:
            return None
        model, source = self.model, self.source
        model.embedding.load(source.fetch_part(model.embedding, model.dtype))
        extra = [part for part in model.parts() if part not in (model.embedding, model.norm)]
        layers = {id(part) for layer in model.layers for part in layer.parts()}
        for part in extra:
            if id(part) not in layers:  # divisors of rotary frequencies
                part.load(source.fetch_part(part))
        model.finish_states()
        return Calibration(model, chunks)

    def _quantized(self, index: int, layer: Layer, calibration: Calibration | None) -> LayerAtWork:
        first, *experts = layer.parts()
        if calibration is not None:
            for expert in experts:
                expert.load(self.source.fetch_part(expert, self.model.dtype))
        tensors = self.source.fetch_part(first)
        linears = quantizable(layer)
        work = LayerAtWork(index, layer, tensors, linears, calibration, self.model.dtype)
        try:
            self.method(work)
        except ValueError as error:
            raise ConfigError(f"{self.source.path}: layer {index}: {error}") from None
        work.finish()
        return work

    def _write(
        self, writer: CheckpointWriter, modules: Sequence[Module], work: LayerAtWork
    ) -> dict[str, object]:
        """Returns the stored names that are written in another way."""
        replaced: dict[str, object] = {}
        for module in modules:
            for suffix, tensor in self.target.format.write(module.weight(work.quantized)).items():
                writer.add(f"{module.name}.{suffix}", tensor)
            replaced[f"{module.name}.weight"] = None
        for name in sorted(work.changed):
            place = self.source.place(name)
            writer.add(place.name, self.source.as_stored(name, work.tensors[name]))
            replaced[place.name] = None
        return replaced

    def _write_head(self, writer: CheckpointWriter, module: Module) -> dict[str, object]:
        """To the nearest: nothing comes after it that could make up for errors."""
        weight = self.source.fetch("head.weight")
        if self.target.round is not None:
            found: Any = self.target.round(weight)
        else:
            assert self.target.grid is not None
            found = self.target.grid.round(weight)
        for suffix, tensor in self.target.format.write(found).items():
            writer.add(f"{module.name}.{suffix}", tensor)
        return {f"{module.name}.weight": None}

    def _write_config(self, output: Path) -> None:
        quantization = dict(self.target.config(self.skipped))
        config = {**self.source.config, "quantization_config": quantization}
        if self.source.is_gguf:
            config["torch_dtype"] = str(self.source.dtype).removeprefix("torch.")
        else:
            files.copy_others(self.source.path, output)
        (output / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        for name in self.target.files:
            (output / name).write_text(json.dumps(quantization, indent=2) + "\n")
